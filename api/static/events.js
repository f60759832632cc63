// Server-sent events out of a response body: { data } or { comment }, as they come. An event here is one line.
export async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ")) yield { data: line.slice(6) };
      else if (line.startsWith(":")) yield { comment: line.slice(1).trim() };
    }
  }
}
