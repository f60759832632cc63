// Enqueues a request straight into Redis and reads its tokens back, with nothing of MTPLX but two Lua scripts.
//
//   npm install --prefix examples
//   node examples/enqueue.mjs redis://localhost:6379 MODEL 1,2,3 16 [ID]
//
// MODEL is a name or an identity (NAME@HASH), 1,2,3 is the prompt as token ids, 16 is the most tokens of the answer.
// Prints {"id", "status", "reason", "tokens"}. Asked again with the same ID, it finds the request and runs nothing.
// What is sent, and why, is in docs/wire.md, section 6.
import { createHash, randomBytes } from "node:crypto";
import { readFile } from "node:fs/promises";
import { decode, encode } from "@msgpack/msgpack";
import { createClient, RESP_TYPES } from "redis";

const TAG = "{mtplx}";
const LUA = new URL("../broker/lua/", import.meta.url);
const ENDED = new Set(["finished", "failed", "cancelled", "expired"]);
const DEADLINE_MS = 3_600_000;
const RETAIN_MS = 600_000;
const POLL_MS = 100;

const key = (...parts) => [TAG, ...parts].join(":");

async function main([url, model, prompt, maxTokens, id = `js-${randomBytes(12).toString("hex")}`]) {
  // Token logs and structs are bytes, which must not be read as text.
  const redis = createClient({ url }).withTypeMapping({ [RESP_TYPES.BLOB_STRING]: Buffer });
  await redis.connect();
  try {
    const card = await findCard(redis, model);
    const tokens = prompt.split(",").map(Number);
    const accepted = await accept(redis, { id, card, tokens, maxTokens: Number(maxTokens) });
    if (!["ok", "again"].includes(accepted)) throw new Error(`refused: ${accepted}`);
    console.log(JSON.stringify({ id, ...(await readToEnd(redis, id)) }));
  } finally {
    redis.destroy();
  }
}

/** What the workers say about a model. */
async function findCard(redis, model) {
  const cards = Object.values(await redis.hGetAll(key("models"))).map((bytes) => {
    const [, identity, name, tokenizer, maxContextTokens] = decode(bytes);
    return { identity, name, tokenizer, maxContextTokens };
  });
  const card = cards.find(({ identity, name }) => model === identity || model === name);
  if (!card) throw new Error(`no model ${model}; there are: ${cards.map(({ name }) => name).join(", ")}`);
  return card;
}

/** ACCEPT: the request enters the system, once, however often this is sent. */
async function accept(redis, { id, card, tokens, maxTokens }) {
  const script = await Promise.all(["prelude.lua", "accept.lua"].map((name) => readFile(new URL(name, LUA), "utf8")));
  const packed = new Uint8Array(new Uint32Array(tokens).buffer); // little endian, as every machine of today
  const request = (name) => Buffer.from(encode(["request", name, card.identity, "balanced", packed, maxTokens]));
  const ticket = Buffer.from(
    encode(["ticket", id, card.identity, "balanced", tokens.length, maxTokens, "offline"]),
  );
  const seed = createHash("sha1").update(id).digest("hex").slice(0, 16);
  const digest = createHash("sha256").update(request("")).update("None").digest("hex");
  const keys = [key("req", id), key("wait", "offline"), key("ordinal"), key("load")];
  keys.push(key("bucket", ""), key("idem", "", ""), key("listening", ""));
  const cost = tokens.length + maxTokens;
  const args = [id, request(id), ticket, digest, seed, "offline", "", cost, "", DEADLINE_MS, RETAIN_MS];
  args.push(10_000, 50_000_000, key("wake"), tokens.length, 0, 0, 0); // bounds, wake channel, no quota, no key
  const reply = await redis.eval(script.join("\n"), {
    keys,
    arguments: args.map((value) => (typeof value === "number" ? String(value) : value)),
  });
  return reply[0].toString();
}

/** The state says when it is over, the token log holds what came out. */
async function readToEnd(redis, id) {
  for (;;) {
    const [status, end] = await redis.hmGet(key("req", id), ["status", "end"]);
    if (status === null) throw new Error(`Redis no longer knows ${id}`);
    if (ENDED.has(status.toString())) {
      const log = (await redis.get(key("log", id))) ?? Buffer.alloc(0);
      const tokens = Array.from({ length: log.length / 4 }, (_, place) => log.readUInt32LE(place * 4));
      const [[, , reason]] = decode(end);
      return { status: status.toString(), reason, tokens };
    }
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

main(process.argv.slice(2)).catch((error) => {
  console.error(`enqueue: ${error.message}`);
  process.exitCode = 1;
});
