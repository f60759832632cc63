// The page: a chat with one model, and the lanes as they are. Everything comes from this server.
import { watchBatches } from "/static/batches.js";
import { readEvents } from "/static/events.js";
import { watchLanes } from "/static/lanes.js";

const byId = (id) => document.getElementById(id);
const conversation = [];
let running = null;

function headers() {
  const key = byId("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function loadModels() {
  try {
    const answer = await fetch("/v1/models", { headers: headers() });
    const body = await answer.json();
    if (!answer.ok) return note(body.error.message, true);
    const chosen = byId("model").value;
    byId("model").replaceChildren(...body.data.map((model) => new Option(model.id, model.id)));
    if (body.data.some((model) => model.id === chosen)) byId("model").value = chosen;
    note(body.data.length ? "" : "No worker has registered a model yet.");
  } catch (error) {
    note(`The server does not answer: ${error.message}`, true);
  }
}

function requestBody() {
  const limit = parseInt(byId("max-tokens").value, 10);
  const temperature = parseFloat(byId("temperature").value);
  return {
    model: byId("model").value,
    messages: conversation.map(({ role, content }) => ({ role, content })),
    stream: true,
    stream_options: { include_usage: true },
    ...(Number.isFinite(temperature) && { temperature }),
    ...(limit > 0 && { max_tokens: limit }),
  };
}

async function send(text) {
  conversation.push({ role: "user", content: text });
  show("user", text);
  const view = show("assistant", "");
  const turn = { text: "", began: performance.now(), first: null, last: null, tokens: null, reason: null };
  running = new AbortController();
  setBusy(true);
  try {
    const answer = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: headers(),
      body: JSON.stringify(requestBody()),
      signal: running.signal,
    });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    for await (const event of readEvents(answer.body)) take(event, turn, view);
    if (turn.reason === null) throw new Error("the answer broke off");
  } catch (error) {
    turn.error = error.name === "AbortError" ? "stopped" : error.message;
  }
  finish(turn, view);
}

function take(event, turn, view) {
  if (event.comment !== undefined) return note(event.comment);
  if (event.data === "[DONE]") return;
  const chunk = JSON.parse(event.data);
  if (chunk.error) throw new Error(chunk.error.message);
  if (chunk.usage) turn.tokens = chunk.usage.completion_tokens;
  for (const choice of chunk.choices) {
    if (choice.finish_reason) turn.reason = choice.finish_reason;
    if (!choice.delta.content) continue;
    turn.last = performance.now();
    turn.first ??= turn.last;
    turn.text += choice.delta.content;
    view.text.textContent = turn.text;
  }
  note("");
  const list = byId("messages");
  list.scrollTop = list.scrollHeight;
}

function finish(turn, view) {
  if (turn.text) conversation.push({ role: "assistant", content: turn.text });
  else conversation.pop();
  view.facts.textContent = facts(turn);
  view.facts.classList.toggle("bad", Boolean(turn.error) && turn.error !== "stopped");
  running = null;
  setBusy(false);
  note("");
}

function facts(turn) {
  const parts = [turn.error ?? turn.reason];
  if (turn.first !== null) parts.push(`first token after ${((turn.first - turn.began) / 1000).toFixed(2)} s`);
  if (turn.tokens !== null) parts.push(`${turn.tokens} tokens`);
  const seconds = (turn.last - turn.first) / 1000;
  if (turn.tokens > 1 && seconds > 0) parts.push(`${((turn.tokens - 1) / seconds).toFixed(1)} tokens/s`);
  return parts.join(" · ");
}

function show(role, content) {
  const item = document.createElement("li");
  item.className = role;
  const text = document.createElement("span");
  text.textContent = content;
  const small = document.createElement("small");
  item.append(text, small);
  byId("messages").append(item);
  item.scrollIntoView({ block: "end" });
  return { text, facts: small };
}

function note(text, isBad = false) {
  byId("note").textContent = text;
  byId("note").classList.toggle("bad", isBad);
}

function setBusy(isBusy) {
  byId("send").disabled = isBusy;
  byId("stop").disabled = !isBusy;
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("prompt").value.trim();
  if (!text || running) return;
  byId("prompt").value = "";
  send(text);
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("form").requestSubmit();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", () => {
  running?.abort();
  conversation.length = 0;
  byId("messages").replaceChildren();
});
byId("key").addEventListener("change", loadModels);

watchLanes(byId, loadModels);
watchBatches(byId, headers);
loadModels();
