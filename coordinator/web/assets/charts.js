// The two small charts: tokens per second, acceptance by depth. SVG, so that the page's colours and fonts hold.
import { useEffect } from "preact/hooks";
import { signal } from "@preact/signals";
import { html } from "./html.js";
import { count, rate, share } from "./format.js";
import { acceptanceByDepth, tokensPerSecond } from "./history.js";
import { heard, history, link, serviceNow, state } from "./store.js";

const SECONDS = 60;
const MAX_DEPTH = 16;
const second = signal(0); // counts seconds: the sparkline moves though nothing is heard

export function Speed() {
  useEffect(() => {
    const timer = setInterval(() => second.value++, 1000);
    return () => clearInterval(timer);
  }, []);
  void second.value;
  void heard.value;
  const sums = tokensPerSecond(history.rounds, serviceNow(), SECONDS);
  const last = sums.at(-2) ?? 0; // the last whole second
  const most = Math.max(...sums);
  const requests = state.value?.requests;
  return html`
    <section class="panel speed" aria-labelledby="speed-title">
      <header><h2 id="speed-title">Tokens per second</h2><p class="note">all requests, last minute</p></header>
      <p class="figure"><b>${rate(last)}</b> <span class="note">${most ? `now, at most ${most}` : "nothing is answered"}</span></p>
      <${Sparkline} sums=${sums} most=${most} />
      <p class="note">
        ${requests && link.value === "live" ? `${count(requests.running, "request")} answered now, ${requests.waiting} waiting` : ""}
      </p>
    </section>
  `;
}

function Sparkline({ sums, most }) {
  const top = Math.max(1, most);
  const bars = sums.map((sum, index) => ({ index, height: (38 * sum) / top, age: sums.length - 1 - index, sum }));
  return html`
    <svg class="chart" viewBox="0 0 ${SECONDS * 4} 40" preserveAspectRatio="none" role="img" aria-label="Tokens in each of the last ${SECONDS} seconds; at most ${most}">
      <rect class="base" x="0" y="39.4" width=${SECONDS * 4} height="0.6" />
      ${bars.map(
        ({ index, height, age, sum }) => html`
          <rect class="bar" x=${index * 4} y=${39.4 - height} width="3.2" height=${height}>
            <title>${`${sum} tokens ${age} s ago`}</title>
          </rect>
        `,
      )}
    </svg>
  `;
}

export function Acceptance() {
  void heard.value;
  const { numRounds, shares } = acceptanceByDepth(history.rounds, MAX_DEPTH);
  return html`
    <section class="panel acceptance" aria-labelledby="acceptance-title">
      <header>
        <h2 id="acceptance-title">Acceptance by depth</h2>
        <p class="note" title="Of rounds that began with a draft, the share that accepted at least so many tokens of it.">
          ${numRounds ? `share of ${count(numRounds, "drafted round")} that accepted at least so many tokens` : "no drafted round yet"}
        </p>
      </header>
      <ol class="depths">
        ${shares.map(
          (part, index) => html`
            <li title=${`${share(part)} of drafted rounds accepted at least ${count(index + 1, "token")}`}>
              <span class="column">
                <span class="value">${part ? Math.round(100 * part) : ""}</span>
                <i style=${{ height: `${84 * part}%` }}></i>
              </span>
              <span class="depth">${index + 1}</span>
            </li>
          `,
        )}
      </ol>
    </section>
  `;
}
