// One question to the service, and the events of its answer.

// Yields {event, data}. Throws an Error with the service's sentence; the answer is whole only if `finished` came.
export async function* ask(question, signal) {
  const response = await fetch("/ui/api/generate", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(question),
    signal,
  });
  if (!response.ok) throw new Error(await sentenceOf(response));
  let isWhole = false;
  for await (const told of events(response.body)) {
    if (told.event === "error") throw new Error(told.data.error.message);
    isWhole ||= told.event === "finished";
    yield told;
  }
  if (!isWhole) throw new Error("the service ended the answer without saying why");
}

// Server-sent events of a stream of bytes. Comments only keep the connection alive.
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const frames = (text + value).split("\n\n");
      text = frames.pop();
      for (const frame of frames) if (!frame.startsWith(":")) yield parse(frame);
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

function parse(frame) {
  const fields = Object.fromEntries(frame.split("\n").map((line) => line.split(/: (.*)/s, 2)));
  return { event: fields.event, data: JSON.parse(fields.data) };
}

async function sentenceOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the service answered with status ${response.status}`;
  }
}
