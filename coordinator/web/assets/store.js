// What the page knows of the service, and the stream it hears it from.
import { signal } from "@preact/signals";
import { History } from "./history.js";

const HIDDEN_PATIENCE_MS = 10_000; // a page that nobody sees stops watching
const RETRY_MS = 3_000;

export const link = signal("connecting"); // connecting | live | lost
export const service = signal(null); // what does not change: version, model, defaults
export const state = signal(null); // what does: workers, requests
export const heard = signal(0); // counts events with spans
export const history = new History();

let clockOffset = 0; // the service's clock minus ours

export function serviceNow() {
  return Date.now() + clockOffset;
}

let source = null;
let retry = 0;
let hiding = 0;

export function watch() {
  loadService();
  connect();
  document.addEventListener("visibilitychange", () => {
    clearTimeout(hiding);
    if (document.hidden) hiding = setTimeout(disconnect, HIDDEN_PATIENCE_MS);
    else if (!source) connect();
  });
}

async function loadService() {
  try {
    const response = await fetch("/ui/api/state");
    if (response.ok) service.value = await response.json();
  } catch {
    link.value = "lost";
  }
}

function connect() {
  clearTimeout(retry);
  source = new EventSource("/ui/api/events");
  source.addEventListener("state", (event) => hearState(JSON.parse(event.data)));
  source.addEventListener("spans", (event) => hearSpans(JSON.parse(event.data)));
  source.addEventListener("error", () => {
    link.value = "lost";
    if (source?.readyState !== EventSource.CLOSED) return; // it tries again by itself
    source = null;
    retry = setTimeout(connect, RETRY_MS);
  });
}

function disconnect() {
  clearTimeout(retry);
  source?.close();
  source = null;
}

function hearState(told) {
  const isBack = link.value !== "live";
  clockOffset = told.now - Date.now();
  link.value = "live";
  state.value = told;
  history.expect(told.workers);
  if (isBack || !service.value?.model) loadService();
}

function hearSpans(told) {
  history.numDropped += told.num_dropped;
  history.add(told.spans);
  heard.value++;
}
