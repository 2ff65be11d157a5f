// The moving timeline: which part of the history is shown, and what one asks of it by mouse and keyboard.
import { useEffect, useRef } from "preact/hooks";
import { signal, useSignal } from "@preact/signals";
import { html } from "./html.js";
import { barAt, draw, heightFor, middleOf, readStyle } from "./drawing.js";
import { count, median, milliseconds, share } from "./format.js";
import { overlapWithin } from "./history.js";
import { heard, history, serviceNow, state } from "./store.js";

const SPANS_MS = [500, 1_000, 2_000, 5_000, 10_000, 30_000];
const LAG_MS = 400; // steps are told when their round has ended
const REST_MS = 250; // shown behind the last step once nothing happens
const MIN_STEP_PX = 8; // of an ordinary step, where the length is chosen for you
const DETAILS_PX = 290; // as wide as style.css says
const SUMMARY_MS = 300; // between two summaries in words
const CALM_REDRAW_MS = 1_000; // for those who asked for less motion

const chosenMs = signal(0); // length shown; 0: by the length of steps
const isPaused = signal(false);
let fitting = SPANS_MS[0]; // what "what fits" means now; it changes only when it has to

export function Timeline() {
  const canvas = useRef(null);
  const selected = useSignal(null);
  const told = useSignal("");
  const view = useRef({ from: 0, to: 1 });
  const lanes = history.orderedLanes();
  useEffect(() => animate(canvas.current, view, selected, told), []);
  const height = heightFor(state.value?.workers.length || lanes.length);
  return html`
    <section class="panel timeline" aria-labelledby="timeline-title">
      <header>
        <h2 id="timeline-title">Timeline</h2>
        <p class="note grow" id="timeline-told">${told}</p>
        <label class="inline">shows
          <select value=${chosenMs} onChange=${(event) => (chosenMs.value = Number(event.target.value))}>
            <option value="0">what fits</option>
            ${SPANS_MS.map((ms) => html`<option value=${ms}>${ms / 1000} s</option>`)}
          </select>
        </label>
        <button type="button" aria-pressed=${isPaused} onClick=${togglePause}>${isPaused.value ? "Go on" : "Pause"}</button>
      </header>
      <div class="canvas-box">
        <canvas
          ref=${canvas}
          tabindex="0"
          role="img"
          aria-label="Steps of each worker over time. Arrow keys go from step to step, space pauses."
          aria-describedby="timeline-told"
          style=${{ height: `${height}px` }}
          onPointerMove=${(event) => point(event, view, selected)}
          onPointerLeave=${() => (selected.value = null)}
          onBlur=${() => (selected.value = null)}
          onKeyDown=${(event) => steer(event, view, selected)}
        ></canvas>
        <${Details} bar=${selected.value} view=${view} canvas=${canvas} />
      </div>
      <${Keys} />
    </section>
  `;
}

// What bars and marks mean, in words.
function Keys() {
  return html`
    <ul class="keys" aria-label="Legend of the timeline">
      <li><i class="swatch verify"></i>verify</li>
      <li><i class="swatch prefill"></i>prefill</li>
      <li><i class="swatch draft"></i>draft, verified</li>
      <li><i class="swatch draft-wasted"></i>draft, in vain</li>
      <li><i class="swatch wait"></i>waited for drafts</li>
      <li><i class="shape hit"></i>hit</li>
      <li><i class="shape lookup"></i>looked up</li>
      <li><i class="shape miss"></i>miss</li>
    </ul>
  `;
}

function togglePause() {
  isPaused.value = !isPaused.value;
}

function animate(canvas, view, selected, told) {
  const context = canvas.getContext("2d");
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let colors = readStyle(canvas);
  let drawnAt = 0;
  let toldAt = -Infinity;
  let drawn = "";
  let request = 0;
  const recolor = () => {
    colors = readStyle(canvas);
    drawn = "";
  };
  const frame = (now) => {
    request = requestAnimationFrame(frame);
    if (calm.matches && now - drawnAt < CALM_REDRAW_MS && !isPaused.value) return;
    const size = fit(canvas, context);
    if (!isPaused.value) view.current = follow(size.width);
    const lanes = history.orderedLanes();
    const bar = selected.value;
    const shown = `${view.current.from} ${view.current.to} ${size.width} ${size.height} ${heard.value} ${bar?.key}`;
    if (shown === drawn) return; // nothing moves: nothing is drawn
    drawn = shown;
    const linked = bar ? history.linkedBars(bar) : [];
    draw(context, { lanes, view: view.current, size, colors, selected: bar, linked });
    drawnAt = now;
    if (now - toldAt < SUMMARY_MS) return;
    toldAt = now;
    told.value = summary(lanes, view.current);
  };
  dark.addEventListener("change", recolor);
  request = requestAnimationFrame(frame);
  return () => {
    cancelAnimationFrame(request);
    dark.removeEventListener("change", recolor);
  };
}

function fit(canvas, context) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const ratio = devicePixelRatio;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return { width, height };
}

// The newest part of the history; it stays at the last step while nothing happens, so that one can look at it.
function follow(width) {
  const now = serviceNow() - LAG_MS;
  const to = history.lastEnd ? Math.min(now, history.lastEnd + REST_MS) : now;
  const length = chosenMs.value || fittingLength(width);
  return { from: to - length, to };
}

function fittingLength(width) {
  const step = ordinaryStep();
  const isGood = (step * width) / fitting >= 0.7 * MIN_STEP_PX && (step * width) / fitting <= 4 * MIN_STEP_PX;
  if (!isGood) fitting = SPANS_MS.filter((length) => (step * width) / length >= MIN_STEP_PX).at(-1) ?? SPANS_MS[0];
  return Math.min(fitting, SPANS_MS.find((length) => length >= history.extent() + REST_MS) ?? fitting);
}

function ordinaryStep() {
  const steps = history.orderedLanes().filter(({ kind }) => kind === "target").flatMap(({ bars }) => bars.slice(-50));
  return median(steps.map((bar) => bar.end - bar.start)) ?? 20;
}

function summary(lanes, { from, to }) {
  if (!history.lastEnd) return "Nothing yet: ask something, here or from anywhere.";
  const { drafting, hidden, exposed } = overlapWithin(lanes, from, to);
  const parts = [];
  if (drafting) parts.push(`${share(hidden / drafting)} of drafting lay under a target step`);
  parts.push(exposed >= 0.1 ? `targets waited ${milliseconds(exposed)} for drafts` : "no target waited for drafts");
  if (history.numDropped) parts.push(`${count(history.numDropped, "span")} too many to show`);
  return parts.join(" · ");
}

function point(event, view, selected) {
  const { left, top, width, height } = event.target.getBoundingClientRect();
  const at = { x: event.clientX - left, y: event.clientY - top };
  selected.value = barAt(history.orderedLanes(), view.current, { width, height }, at);
}

function steer(event, view, selected) {
  const acts = {
    " ": togglePause,
    ArrowLeft: () => select(view, selected, neighbour(selected.value, -1) ?? newest(0)),
    ArrowRight: () => select(view, selected, neighbour(selected.value, 1) ?? newest(0)),
    ArrowUp: () => select(view, selected, across(selected.value, -1) ?? newest(0)),
    ArrowDown: () => select(view, selected, across(selected.value, 1) ?? newest(1)),
    "+": () => zoom(-1, view),
    "-": () => zoom(1, view),
  };
  const act = acts[event.key];
  if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  act();
}

function newest(index) {
  return history.orderedLanes()[index]?.bars.at(-1) ?? null;
}

function neighbour(bar, direction) {
  return bar ? bar.lane.bars[bar.lane.bars.indexOf(bar) + direction] ?? bar : null;
}

// The step of the next lane that ran at the same time, or nearly.
function across(bar, direction) {
  if (!bar) return null;
  const lanes = history.orderedLanes();
  const next = lanes[lanes.indexOf(bar.lane) + direction];
  const distance = (other) => Math.abs(other.start - bar.start);
  return next?.bars.reduce((best, other) => (best && distance(best) <= distance(other) ? best : other), null) ?? bar;
}

function select(view, selected, bar) {
  if (!bar) return;
  isPaused.value = true;
  selected.value = bar;
  const { from, to } = view.current;
  if (bar.start < from || bar.end > to) {
    const middle = (bar.start + bar.end) / 2;
    view.current = { from: middle - (to - from) / 2, to: middle + (to - from) / 2 };
  }
}

function zoom(direction, view) {
  const length = view.current.to - view.current.from;
  const nearest = SPANS_MS.reduce((best, ms) => (Math.abs(ms - length) < Math.abs(best - length) ? ms : best));
  chosenMs.value = SPANS_MS[Math.min(SPANS_MS.length - 1, Math.max(0, SPANS_MS.indexOf(nearest) + direction))];
  if (isPaused.value) view.current = { from: view.current.to - chosenMs.value, to: view.current.to };
}

// What is known of a step, below the lanes so that it hides none.
function Details({ bar, view, canvas }) {
  if (!bar || !canvas.current) return null;
  const size = { width: canvas.current.clientWidth, height: canvas.current.clientHeight };
  const x = middleOf(bar, view.current, size.width);
  const left = Math.max(0, Math.min(x - DETAILS_PX / 2, size.width - DETAILS_PX));
  return html`
    <div class="details" role="status" style=${{ left: `${left}px`, top: `${size.height + 4}px` }}>
      <b>${bar.name}${bar.name === "prefill" ? "" : ` · step ${bar.parts[0].attributes.step}`}</b>
      <dl>${facts(bar).map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl>
    </div>
  `;
}

function facts(bar) {
  const [{ attributes }] = bar.parts;
  const sum = (name) => bar.parts.reduce((total, part) => total + (part.attributes[name] ?? 0), 0);
  const found = [["forward", milliseconds(bar.end - bar.start)]];
  if (bar.exposed) found.push(["waited for drafts", milliseconds(bar.exposed)]);
  if (bar.name === "prefill") return [...found, ["rows", String(sum("num_rows"))]];
  found.push(["batch", `${count(attributes.batch_sessions, "session")}, ${count(attributes.batch_tokens, "row")}`]);
  if (bar.name === "verify") {
    const isOne = bar.parts.length === 1;
    found.push([isOne ? `round ${attributes.round}` : "rounds", isOne ? (outcomeWords[bar.parts[0].outcome] ?? "not told yet") : outcomeCounts(bar)]);
    found.push(["verified", `${count(sum("num_verified"), "node")}, ${sum("num_accepted")} accepted`]);
    const linked = history.linkedBars(bar).size;
    if (linked) found.push(["drafted in", count(linked, "step")]);
  }
  if (bar.name === "draft") found.push(["nodes", bar.isUsed ? "some were verified" : "none was verified so far"]);
  return found;
}

const outcomeWords = {
  hit: "began with a draft: hit",
  lookup: "began with nodes looked up in the text",
  miss: "began without a draft: miss",
  late: "miss: the draft came too late",
  stale: "miss: the draft led elsewhere",
  none: "not counted",
};

function outcomeCounts(bar) {
  const outcomes = bar.parts.map(({ outcome }) => outcome);
  return Object.keys(outcomeWords).filter((kind) => outcomes.includes(kind)).map((kind) => `${outcomes.filter((outcome) => outcome === kind).length} ${kind}`).join(", ");
}
