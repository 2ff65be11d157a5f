// Asking: the question with its options, the answer as it comes, its statistics.
import { useEffect, useRef } from "preact/hooks";
import { batch, signal } from "@preact/signals";
import { html } from "./html.js";
import { AnswerText, ORIGINS } from "./answer.js";
import { count, milliseconds, rate } from "./format.js";
import { ask } from "./generate.js";
import { statisticsOf } from "./statistics.js";
import { service } from "./store.js";

const EXAMPLE = 'def read_json(path):\n    """Return what a JSON file holds."""\n';

const form = { prompt: signal(EXAMPLE), mode: signal(""), temperature: signal("0.5"), tokens: signal("128"), seed: signal("") };
const phase = signal("idle"); // idle | asking | done | stopped | failed
const problem = signal("");
const counts = signal(noCounts());
const elapsedMs = signal(0);
const firstMs = signal(null);
const finished = signal(null);

let seed = "";
let asking = null;

function noCounts() {
  return Object.fromEntries(Object.keys(ORIGINS).map((origin) => [origin, 0]));
}

function total() {
  return Object.values(counts.value).reduce((sum, number) => sum + number, 0);
}

export function Playground() {
  const text = useRef(null);
  const send = () => answer(new AnswerText(text.current));
  useEffect(() => {
    const stopOnEscape = (event) => event.key === "Escape" && stop();
    document.addEventListener("keydown", stopOnEscape);
    return () => document.removeEventListener("keydown", stopOnEscape);
  }, []);
  return html`
    <section class="panel question" aria-labelledby="question-title">
      <header><h2 id="question-title">Question</h2><p class="note">Ctrl+Enter sends, Esc stops</p></header>
      <${Question} send=${send} />
    </section>
    <section class="panel answer" aria-labelledby="answer-title">
      <header>
        <h2 id="answer-title">Answer</h2>
        <${Legend} />
      </header>
      <div class="text" ref=${text} tabindex="0" role="group" aria-label="Text of the answer"></div>
      <${Outcome} />
    </section>
  `;
}

function Question({ send }) {
  const sendOnEnter = (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    send();
  };
  const submit = (event) => {
    event.preventDefault();
    send();
  };
  return html`
    <form novalidate onSubmit=${submit} onKeyDown=${sendOnEnter}>
      <textarea
        id="prompt"
        aria-label="Prompt"
        rows="7"
        spellcheck="false"
        autofocus
        value=${form.prompt}
        onInput=${(event) => (form.prompt.value = event.target.value)}
      ></textarea>
      <div class="options">
        <${Mode} />
        <${Field} label="Temperature" name="temperature" title="0: always the most likely token." step="0.1" min="0" />
        <${Field} label="Tokens" name="tokens" title="Tokens of the answer at most." step="1" min="1" />
        <${Field} label="Seed" name="seed" title="The same seed gives the same answer. Empty: one is drawn." hint="drawn" />
        <div class="buttons">
          <button type="submit" class="primary" disabled=${phase.value === "asking"}>Send</button>
          <button type="button" disabled=${phase.value !== "asking"} onClick=${stop}>Stop</button>
        </div>
      </div>
    </form>
  `;
}

function Mode() {
  const usual = service.value?.defaults?.mode;
  return html`
    <label title="How to speculate. The answer is the same in every mode, only sooner or later.">
      Mode
      <select id="mode" value=${form.mode} onChange=${(event) => (form.mode.value = event.target.value)}>
        <option value="">${usual ? `default (${usual})` : "default"}</option>
        <option value="pipelined">pipelined</option>
        <option value="sync">sync</option>
        <option value="off">off</option>
      </select>
    </label>
  `;
}

function Field({ label, name, title, hint, ...range }) {
  const kind = range.step ? "number" : "text";
  return html`
    <label title=${title}>
      ${label}
      <input
        id=${name}
        type=${kind}
        inputmode=${kind === "text" ? "numeric" : "decimal"}
        autocomplete="off"
        placeholder=${hint}
        ...${range}
        value=${form[name]}
        onInput=${(event) => (form[name].value = event.target.value)}
      />
    </label>
  `;
}

// Colour and line of each origin, how many tokens had it, and the words.
function Legend() {
  const sum = total();
  return html`
    <ul class="keys origins" aria-label="Where tokens came from">
      ${Object.entries(ORIGINS).map(
        ([origin, { name, words }]) => html`
          <li title=${words}>
            <span class="token ${origin}">${name}</span>
            <span class="number">${sum ? counts.value[origin] : ""}</span>
          </li>
        `,
      )}
    </ul>
  `;
}

function Outcome() {
  return html`
    <div class="outcome">
      ${phase.value === "failed" && html`<p class="problem" role="alert">${problem}</p>`}
      <p class="progress" role="status">${progress()}</p>
      ${finished.value && html`<${Statistics} />`}
    </div>
  `;
}

function progress() {
  const number = total();
  if (phase.value === "idle") return "";
  if (phase.value === "asking") {
    if (!number) return "waiting for the first token …";
    const seconds = (elapsedMs.value - firstMs.value) / 1000;
    const speed = seconds > 0.2 ? ` · ${rate(number / seconds)} tokens/s` : "";
    return `${count(number, "token")} in ${milliseconds(elapsedMs.value)}${speed}`;
  }
  if (phase.value === "stopped") return `stopped after ${count(number, "token")}`;
  return phase.value === "failed" && number ? `broken off after ${count(number, "token")}` : "";
}

function Statistics() {
  const rows = statisticsOf(finished.value, seed);
  return html`
    <dl class="statistics">
      ${rows.map(([name, value, words]) => html`<div title=${words}><dt>${name}</dt><dd>${value}</dd></div>`)}
    </dl>
    <details class="meanings">
      <summary>What these numbers mean</summary>
      <dl>${rows.map(([name, , words]) => html`<dt>${name}</dt><dd>${words}</dd>`)}</dl>
    </details>
  `;
}

// The question as the service takes it; what is empty takes its default.
export function questionOf({ prompt, mode, temperature, tokens, seed: wanted }) {
  const question = { prompt };
  if (mode) question.mode = mode;
  if (temperature !== "") question.temperature = Number(temperature);
  if (tokens !== "") question.max_tokens = Number(tokens);
  if (wanted.trim() !== "") question.seed = wanted.trim();
  return question;
}

async function answer(text) {
  if (asking) return;
  asking = new AbortController();
  const question = questionOf(Object.fromEntries(Object.entries(form).map(([name, { value }]) => [name, value])));
  const startedAt = performance.now();
  begin(text, question.prompt);
  try {
    for await (const { event, data } of ask(question, asking.signal)) hear(event, data, text, startedAt);
    phase.value = "done";
  } catch (error) {
    batch(() => {
      phase.value = error.name === "AbortError" ? "stopped" : "failed";
      problem.value = error instanceof TypeError ? "the service cannot be reached" : error.message;
    });
  } finally {
    asking = null;
  }
}

function begin(text, prompt) {
  text.clear(prompt);
  batch(() => {
    phase.value = "asking";
    counts.value = noCounts();
    finished.value = null;
    firstMs.value = null;
    problem.value = "";
  });
}

function hear(event, data, text, startedAt) {
  const now = performance.now() - startedAt;
  if (event === "started") seed = data.seed;
  if (event === "finished") finished.value = data;
  if (event !== "chunk") return;
  text.add(data.round, data.pieces);
  const sums = { ...counts.value };
  for (const [, , origin] of data.pieces) sums[origin]++;
  batch(() => {
    firstMs.value ??= now;
    elapsedMs.value = now;
    counts.value = sums;
  });
}

function stop() {
  asking?.abort();
}
