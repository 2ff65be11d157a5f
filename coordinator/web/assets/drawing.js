// The timeline's picture on a canvas. Knows geometry and colours; what bars mean is in history.js.
import { barsWithin } from "./history.js";

const LANE_HEIGHT = 22;
const LANE_GAP = 20; // below a lane: marks
const LABEL_HEIGHT = 15;
const TOP = 4;
const AXIS = 20;
const MIN_MARKED_PX = 3; // narrower rounds have no room for a shape
const MIN_NUMBER_PX = 20;

const MISSES = new Set(["miss", "late", "stale"]); // told apart by what came too late

const COLORS = [
  "ink", "muted", "hairline", "panel", "verify", "prefill", "draft", "draft-wasted", "wait", "hit", "miss", "on-bar", "focus",
];

// Colours by name, and the font.
export function readStyle(element) {
  const style = getComputedStyle(element);
  const colors = COLORS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]);
  return { ...Object.fromEntries(colors), font: `11px ${style.fontFamily}` };
}

export function heightFor(numLanes) {
  return TOP + Math.max(1, numLanes) * (LABEL_HEIGHT + LANE_HEIGHT + LANE_GAP) + AXIS;
}

// `view` is {from, to} in milliseconds of the service's clock, `size` {width, height} in CSS pixels.
export function draw(context, { lanes, view, size, colors, selected, linked }) {
  const scale = size.width / (view.to - view.from);
  const x = (time) => (time - view.from) * scale;
  context.clearRect(0, 0, size.width, size.height);
  drawAxis(context, view, size, colors, x);
  lanes.forEach((lane, index) => {
    const y = laneTop(index);
    drawLabel(context, lane, y, colors);
    context.fillStyle = colors.hairline;
    context.fillRect(0, y + LANE_HEIGHT, size.width, 1);
    const bars = barsWithin(lane, view.from, view.to);
    for (const bar of bars) if (bar.name === "prefill") drawBar(context, bar, y, x, colors); // others' steps lie over it
    for (const bar of bars) if (bar.name !== "prefill") drawBar(context, bar, y, x, colors);
  });
  for (const bar of linked) outline(context, bar, lanes, x, colors.draft, 2);
  if (selected) outline(context, selected, lanes, x, colors.focus, 2);
}

export function barAt(lanes, view, size, point) {
  const index = lanes.findIndex((_, i) => point.y >= laneTop(i) - 3 && point.y <= laneTop(i) + LANE_HEIGHT + LANE_GAP - 4);
  if (index < 0) return null;
  const perPixel = (view.to - view.from) / size.width;
  const time = view.from + point.x * perPixel;
  const near = barsWithin(lanes[index], time - 4 * perPixel, time + 4 * perPixel);
  const distance = (bar) => Math.max(0, bar.start - time, time - bar.end);
  return near.sort((a, b) => distance(a) - distance(b))[0] ?? null;
}

export function middleOf(bar, view, width) {
  const middle = (Math.max(bar.start, view.from) + Math.min(bar.end, view.to)) / 2;
  return ((middle - view.from) * width) / (view.to - view.from);
}

function laneTop(index) {
  return TOP + index * (LABEL_HEIGHT + LANE_HEIGHT + LANE_GAP) + LABEL_HEIGHT;
}

function drawLabel(context, lane, y, colors) {
  context.font = colors.font;
  context.textBaseline = "alphabetic";
  const kind = lane.kind === "target" ? "target worker" : "draft worker";
  const indent = context.measureText(`${kind}  `).width;
  context.fillStyle = colors.panel; // no line of the axis goes through the text
  context.fillRect(0, y - LABEL_HEIGHT, indent + context.measureText(lane.address).width + 4, LABEL_HEIGHT);
  context.fillStyle = colors.ink;
  context.fillText(kind, 0, y - 5);
  context.fillStyle = colors.muted;
  context.fillText(lane.address, indent, y - 5);
}

function drawAxis(context, view, size, colors, x) {
  const step = tickStep((view.to - view.from) / Math.max(2, size.width / 110));
  context.font = colors.font;
  context.textBaseline = "alphabetic";
  for (let time = view.to - step; time > view.from; time -= step) {
    context.fillStyle = colors.hairline;
    context.fillRect(Math.round(x(time)), 0, 1, size.height - AXIS);
    context.fillStyle = colors.muted;
    const text = label(time - view.to);
    context.fillText(text, x(time) - context.measureText(text).width / 2, size.height - 6);
  }
}

function tickStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least);
}

function label(ms) {
  return ms <= -1000 ? `−${-ms / 1000} s` : `−${Math.round(-ms)} ms`;
}

function drawBar(context, bar, y, x, colors) {
  const left = x(bar.start);
  const width = Math.max(1.5, x(bar.end) - left - 0.5);
  if (bar.exposed > 0) drawWait(context, x(bar.start - bar.exposed), left, y, colors);
  context.fillStyle = fillOf(bar, colors);
  context.fillRect(left, y, width, LANE_HEIGHT);
  if (bar.name === "draft" && !bar.isUsed) drawStripe(context, left, width, y, colors.draft);
  if (bar.name === "prefill") drawStripe(context, left, width, y, colors.verify);
  if (bar.name === "verify") drawRound(context, bar, left, width, y, colors);
}

function fillOf(bar, colors) {
  if (bar.name === "prefill") return bar.lane.kind === "target" ? colors.prefill : colors["draft-wasted"];
  if (bar.name === "draft") return bar.isUsed ? colors.draft : colors["draft-wasted"];
  return colors.verify;
}

function drawStripe(context, left, width, y, color) {
  context.fillStyle = color;
  context.fillRect(left, y + LANE_HEIGHT - 2, width, 2);
}

function drawWait(context, from, to, y, colors) {
  context.save();
  context.beginPath();
  context.rect(from, y, to - from, LANE_HEIGHT);
  context.clip();
  context.strokeStyle = colors.wait;
  context.lineWidth = 1.5;
  context.beginPath();
  const phase = Math.floor(from / 5) * 5 - LANE_HEIGHT;
  for (let at = phase; at < to; at += 5) {
    context.moveTo(at, y + LANE_HEIGHT);
    context.lineTo(at + LANE_HEIGHT, y);
  }
  context.stroke();
  context.restore();
}

function drawRound(context, bar, left, width, y, colors) {
  const tokens = bar.parts.reduce((sum, part) => sum + part.tokens, 0);
  if (width >= MIN_NUMBER_PX) {
    context.fillStyle = colors["on-bar"];
    context.font = `600 ${colors.font}`;
    const text = `+${tokens}`;
    context.fillText(text, left + (width - context.measureText(text).width) / 2, y + LANE_HEIGHT / 2 + 4);
  }
  mark(context, outcomeOf(bar), left + width / 2, y + LANE_HEIGHT + 9, width, colors);
}

// Of several sessions the worst counts: a miss is what one looks for.
function outcomeOf(bar) {
  const outcomes = new Set(bar.parts.map(({ outcome }) => (MISSES.has(outcome) ? "miss" : outcome)));
  return ["miss", "lookup", "hit"].find((outcome) => outcomes.has(outcome)) ?? "none";
}

// A filled dot, a filled diamond, a hollow ring: shapes, for those who do not see the colours.
function mark(context, outcome, x, y, width, colors) {
  const size = Math.min(3.5, Math.max(1.5, width / 2.4));
  context.beginPath();
  if (outcome === "miss") {
    context.strokeStyle = colors.miss;
    context.lineWidth = 1.6;
    if (width < MIN_MARKED_PX) context.rect(x - 0.5, y - 5, 1, 10);
    else context.arc(x, y, size, 0, 2 * Math.PI);
    context.stroke();
  } else if (outcome === "hit") {
    context.fillStyle = colors.hit;
    context.arc(x, y, size - 0.3, 0, 2 * Math.PI);
    context.fill();
  } else if (outcome === "lookup") {
    context.fillStyle = colors.hit;
    context.moveTo(x, y - size - 1);
    context.lineTo(x + size + 1, y);
    context.lineTo(x, y + size + 1);
    context.lineTo(x - size - 1, y);
    context.fill();
  }
}

function outline(context, bar, lanes, x, color, lineWidth) {
  const index = lanes.indexOf(bar.lane);
  if (index < 0) return;
  const left = x(bar.start);
  context.strokeStyle = color;
  context.lineWidth = lineWidth;
  context.strokeRect(left - 1.5, laneTop(index) - 1.5, Math.max(1.5, x(bar.end) - left) + 3, LANE_HEIGHT + 3);
}
