// The workers and how they are.
import { html } from "./html.js";
import { median, milliseconds } from "./format.js";
import { heard, history, link, state } from "./store.js";

const WORDS = {
  connected: "connected",
  full: "connected, full",
  silent: "silent: gets no new sessions",
  lost: "not connected: dialled again",
};

export function Workers() {
  void heard.value;
  const workers = state.value?.workers ?? [];
  return html`
    <section class="panel workers" aria-labelledby="workers-title">
      <header><h2 id="workers-title">Workers</h2></header>
      <div class="scroll" tabindex="0" role="group" aria-label="Table of workers">
        <table>
          <thead>
            <tr>
              <th scope="col">worker</th>
              <th scope="col">state</th>
              <th scope="col" class="right">sessions</th>
              <th scope="col" class="right" title="Tokens for which the KV cache has room.">free slots</th>
              <th scope="col" class="right" title="Median of the last steps that were seen.">step</th>
            </tr>
          </thead>
          <tbody>${workers.map((worker) => html`<${Row} key=${worker.kind + worker.address} worker=${worker} />`)}</tbody>
        </table>
      </div>
    </section>
  `;
}

function Row({ worker }) {
  const isKnown = link.value === "live";
  const condition = worker.state === "connected" && !worker.has_room ? "full" : worker.state;
  const steps = history.lane(worker.kind, worker.address).bars.slice(-100);
  const step = median(steps.filter(({ name }) => name !== "prefill").map((bar) => bar.end - bar.start));
  return html`
    <tr class=${isKnown ? condition : "unknown"}>
      <th scope="row"><span class="kind">${worker.kind}</span> <span class="address">${worker.address}</span></th>
      <td><i class="dot" aria-hidden="true"></i>${isKnown ? WORDS[condition] : "not known"}</td>
      <td class="right">${worker.sessions ?? "–"}</td>
      <td class="right"><${Slots} worker=${worker} /></td>
      <td class="right">${milliseconds(step)}</td>
    </tr>
  `;
}

function Slots({ worker }) {
  if (!worker.num_slots) return "–";
  const used = 1 - worker.free_slots / worker.num_slots;
  return html`
    <span class="gauge" title=${`${worker.free_slots} of ${worker.num_slots} are free`}>
      <span class="number">${worker.free_slots.toLocaleString("en")}</span>
      <meter min="0" max="1" value=${used} aria-label="share of slots in use"></meter>
    </span>
  `;
}
