// Server-sent events out of a response body: { data } or { comment }, as they come.
export async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      if (frame.startsWith("data: ")) yield { data: frame.slice(6) };
      else if (frame.startsWith(":")) yield { comment: frame.slice(1).trim() };
    }
  }
}
