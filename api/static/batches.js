// Batches and how far they have come, every two seconds while the page is seen.
const PERIOD_MS = 2000;
const SHOWN = 8;
const OVER = ["failed", "completed", "expired", "cancelled"];

export function watchBatches(byId, headers) {
  async function look() {
    if (!document.hidden) {
      const batches = await fetchBatches(headers());
      byId("batches-title").hidden = batches.length === 0;
      byId("batches").replaceChildren(...batches.map(batchView));
    }
    setTimeout(look, PERIOD_MS);
  }
  look();
}

async function fetchBatches(headers) {
  try {
    const answer = await fetch(`/v1/batches?limit=${SHOWN}`, { headers });
    return answer.ok ? (await answer.json()).data : []; // off, or no key yet: there is nothing to show
  } catch {
    return [];
  }
}

function batchView(batch) {
  const { total, completed, failed } = batch.request_counts;
  const box = document.createElement("div");
  box.className = "batch";
  const bar = document.createElement("progress");
  bar.max = total || 1;
  if (total || OVER.includes(batch.status)) bar.value = completed + failed;
  bar.setAttribute("aria-label", `batch ${batch.id}`);
  box.append(line("h3", batch.id), bar, line("p", facts(batch)));
  return box;
}

function facts(batch) {
  const { total, completed, failed } = batch.request_counts;
  const parts = [batch.status, `${completed} of ${total} answered`];
  if (failed) parts.push(`${failed} failed`);
  if (batch.waits_for) parts.push(`waits: ${batch.waits_for}`);
  if (batch.errors) parts.push(batch.errors.data[0].message);
  return parts.join(" · ");
}

function line(tag, text) {
  const node = document.createElement(tag);
  node.textContent = text;
  return node;
}
