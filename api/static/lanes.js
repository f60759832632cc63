// The lanes as /health tells of them, once a second while the page is seen.
const PERIOD_MS = 1000;

export function watchLanes(byId, onModelsChanged) {
  let known = "";
  async function look() {
    if (!document.hidden) {
      const health = await fetchHealth();
      showHealth(byId, health);
      const models = health.lanes.map((lane) => lane.model).join();
      if (models !== known) onModelsChanged();
      known = models;
    }
    setTimeout(look, PERIOD_MS);
  }
  look();
}

async function fetchHealth() {
  try {
    return await (await fetch("/health")).json(); // also a 503 has a body
  } catch {
    return { status: "unreachable", reason: "the server does not answer", lanes: [], formers: [], queue: {} };
  }
}

function showHealth(byId, health) {
  const badge = byId("health");
  badge.textContent = health.status;
  badge.title = health.reason;
  badge.className = `badge ${health.status}`;
  const workers = health.lanes.flatMap((lane) => lane.workers);
  const running = workers.reduce((sum, worker) => sum + worker.rows_active, 0);
  const offline = health.queue.offline ?? 0;
  const accepted = (health.queue.interactive ?? 0) + offline;
  byId("waiting").textContent = Math.max(0, accepted - running); // the two are counted a moment apart
  byId("running").textContent = running;
  byId("offline").textContent = offline;
  byId("formers").textContent = health.formers.filter((former) => former.working).map(formerFacts).join(" · ");
  byId("lanes").replaceChildren(...health.lanes.map(laneView));
}

function laneView(lane) {
  const box = element("div", "lane");
  const depth = lane.depth ? `, depth ${lane.depth}` : "";
  box.append(
    element("h3", "", lane.model),
    element("p", "", `${lane.mode}${depth}, ${lane.profile}, context ${lane.max_context_tokens}`),
    ...lane.workers.map(workerView),
  );
  box.title = lane.lane;
  return box;
}

function workerView(worker) {
  const box = element("div", "worker");
  const rows = element("div", "rows");
  for (let row = 0; row < worker.rows; row++) rows.append(element("span", row < worker.rows_active ? "busy" : ""));
  const state = worker.accepting ? worker.phase : `${worker.phase}, not accepting`;
  const paused = worker.rows_paused ? `, ${worker.rows_paused} paused` : "";
  box.append(
    element("div", "", `${worker.id}: ${state}, ${worker.rows_active} of ${worker.rows} rows${paused}`),
    rows,
    element("div", "facts", snapshotFacts(worker.snapshot)),
  );
  return box;
}

function snapshotFacts(snapshot) {
  const plain = Object.entries(snapshot).filter(([, value]) => ["number", "string"].includes(typeof value));
  const text = ([name, value]) => `${name.replaceAll("_", " ")} ${shorten(value)}`;
  return plain.map(text).join(" · ");
}

const formerFacts = (former) => snapshotFacts(former.snapshot) || `formed by ${former.id}`;

const shorten = (value) => (Number.isFinite(value) && !Number.isInteger(value) ? value.toPrecision(3) : value);

function element(tag, className, text = "") {
  const node = document.createElement(tag);
  node.className = className;
  node.textContent = text;
  return node;
}
