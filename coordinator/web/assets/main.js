// The page: its frame, and what is always in sight.
import { render } from "preact";
import { html } from "./html.js";
import { Acceptance, Speed } from "./charts.js";
import { Playground } from "./playground.js";
import { Timeline } from "./timeline.js";
import { Workers } from "./workers.js";
import { link, service, state, watch } from "./store.js";

function App() {
  return html`
    <a class="skip" href="#prompt">To the question</a>
    <${Header} />
    <main>
      <${Playground} />
      <${Timeline} />
      <${Speed} />
      <${Acceptance} />
      <${Workers} />
    </main>
  `;
}

function Header() {
  const model = service.value?.model;
  return html`
    <header class="top">
      <h1>specpipe <small>${service.value?.version ?? ""}</small></h1>
      <p>${model ? html`<b>${model.name}</b> <span class="note">${drafterWords()}</span>` : ""}</p>
      <p class="grow"></p>
      <p class="health ${health()}" role="status"><i class="dot" aria-hidden="true"></i>${healthWords[health()]}</p>
    </header>
  `;
}

function drafterWords() {
  const { drafter } = service.value;
  if (drafter === "model") return "with a draft model";
  return drafter === "ngram" ? "with lookups in the text" : "nothing drafts";
}

const healthWords = {
  connecting: "connecting",
  ready: "ready",
  starting: "waits for a target worker",
  stopping: "is stopping",
  lost: "not reachable, trying again",
};

function health() {
  if (link.value !== "live" || !state.value) return link.value === "live" ? "connecting" : link.value;
  if (state.value.is_stopping) return "stopping";
  return state.value.is_ready ? "ready" : "starting";
}

render(html`<${App} />`, document.getElementById("app"));
watch();
