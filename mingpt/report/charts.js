// Draws the report's curves with uPlot. The numbers stand in the page as JSON (#curves): nothing is requested.
// Text of a run reaches the page as text alone (textContent), never as HTML.
"use strict";

const runs = JSON.parse(document.getElementById("curves").textContent);
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name);
const color = number => css(`--c${number % 10}`);
const alone = runs.length === 1;
const bands = runs[0].attempts.filter(({ first, last }) => last > first);
const kinds = [...new Set(bands.map(({ kind }) => kind))]; // of machines, which have a color each
const shaded = alone && bands.length > 1; // one attempt's band would say nothing
const place = document.getElementById("charts");

const CHARTS = [
  { key: "loss", title: "Loss", unit: "nats per token", mean: true, forks: true, most: 0.95, height: 380 },
  { key: "grad_norm", title: "Gradient norm", unit: "before clipping", mean: true, forks: true, most: 0.99, height: 220 },
  { key: "lr", title: "Learning rate", unit: "of each step", zero: true, height: 220 },
  { key: "tokens_per_second", title: "Speed", unit: "tokens per second", zero: true, height: 220 },
  { key: "mfu", title: "MFU", unit: "% of the hardware's peak", zero: true, height: 220 },
];
const AXES = { step: "step", tokens: "tokens", hours: "hours of training" };
const WINDOWS = [1, 3, 10, 30, 100, 300, 1000, 3000, 10000]; // steps that a mean is taken over
const MARKS = { killed: "#dc2626", failed: "#dc2626", rollback: "#8b5cf6", rewind: "#8b5cf6", skipped: "#d97706" };

const last = Math.max(1, ...runs.map(run => run.curves.loss?.x.at(-1) ?? 1));
const chosen = { x: "step", logX: false, logY: false, all: false, mean: Math.max(0, WINDOWS.findLastIndex(n => n * 30 <= last)) };
let charts = []; // the uPlots that are drawn
let whole = [0, 1]; // their x axis without zoom

// --- numbers ---

function number(value) {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  return size >= 1 ? value.toFixed(4) : size >= 1e-3 || !size ? value.toPrecision(4) : value.toExponential(2);
}

function tick(value) {
  const size = Math.abs(value);
  if (size >= 1e15) return value.toExponential(1);
  if (size >= 1e6) return value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 2 });
  if (size && size < 1e-3) return value.toExponential().replace(/(\.\d{2})\d+/, "$1");
  return value.toLocaleString("en", { maximumFractionDigits: 6 });
}

// The value of a curve at a step: on the line between its points, also beyond the last one.
function between({ x, y }, at) {
  let high = x.findIndex(step => step >= at);
  if (high < 0) high = x.length - 1;
  const low = Math.max(0, high - 1);
  if (high === low) return y[low];
  return y[low] + ((y[high] - y[low]) * (at - x[low])) / (x[high] - x[low]);
}

const hasParent = run => run.fork?.of != null; // a fork whose parent is in the page

// From a step to its place on the x axis; null where the run has not recorded it. A fork goes on from its parent's.
function axisOf(run, depth = 0) {
  const known = { tokens: run.curves.tokens_seen, hours: run.hours }[chosen.x];
  if (!known) return step => step;
  if (known.x.length < 2) return () => null;
  const before = hasParent(run) && chosen.x === "hours" && depth < 20 ? axisOf(runs[run.fork.of], depth + 1)(run.fork.step) : 0;
  return step => between(known, step) + before;
}

// What happened to a run: the step, the kind of it, a sentence.
function* marksOf(run) {
  for (const { number, last, end, dropped } of run.attempts)
    if (dropped) yield [last, "rollback", `went back to step ${last}, and left out batches ${dropped[0]} to ${dropped[1] - 1}`];
    else if (!["finished", "running"].includes(end)) yield [last, end.split(":")[0], `attempt ${number}: ${end}`];
  for (const [step, spike] of run.skipped) yield [step, "skipped", `step ${step} was skipped: ${spike ? "a spike" : "not finite"}`];
}

for (const [i, run] of runs.entries()) {
  const { mfu, step_seconds: pace, tokens_seen: tokens } = run.curves, start = run.fork?.step ?? 0;
  run.color = color(i);
  run.marks = [...marksOf(run)].sort(([one], [two]) => one - two);
  mfu.y = mfu.y.map(share => share * 100);
  if (tokens.x.length && !start) (tokens.x.unshift(0), tokens.y.unshift(0));
  // The seconds that a step took, added up.
  let seconds = 0;
  run.hours = { x: [start], y: [0] };
  pace.x.forEach((step, k) => {
    seconds += pace.y[k] * (step - run.hours.x[k]);
    run.hours.x.push(step);
    run.hours.y.push(seconds / 3600);
  });
}

// The mean of about `size` points around each one. Skipped steps don't count. Before the first and after the last there
// are none: near the beginning, where a curve is steep, as many are taken on both sides, near the end those that there are.
function means({ x, y }, size, skipped) {
  const sums = [0], counts = [0];
  y.forEach((value, i) => {
    const counts_here = skipped.has(x[i]) ? 0 : 1;
    sums.push(sums[i] + value * counts_here);
    counts.push(counts[i] + counts_here);
  });
  return y.map((value, i) => {
    const half = Math.min(Math.floor(size / 2), i), end = Math.min(y.length, i + half + 1);
    const count = counts[end] - counts[i - half];
    return count ? (sums[end] - sums[i - half]) / count : value;
  });
}

// A run's points by step; before a fork's own those of its parent, if that is in the page: it has them, too.
function pointsOf(run, chart, depth = 0) {
  const own = run.curves[chart.key];
  if (!hasParent(run) || depth > 20) return own;
  const { of, step } = run.fork, before = own.x.filter(at => at <= step).length;
  if (!chart.forks) return { x: own.x.slice(before), y: own.y.slice(before) };
  const { x, y } = pointsOf(runs[of], chart, depth + 1);
  const count = x.filter(at => at <= step).length;
  return { ...own, x: [...x.slice(0, count), ...own.x], y: [...y.slice(0, count), ...own.y] };
}

// What is drawn of a run: each point, or the range of each group of them; the mean; where it leaves its parent.
function linesOf(run, chart) {
  const points = pointsOf(run, chart), own = run.curves[chart.key], count = points.x.length;
  const skipped = new Set(run.skipped.map(([step]) => step));
  const size = (WINDOWS[chosen.mean] * (count - 1)) / Math.max(1, points.x[count - 1] - points.x[0]);
  const from = Math.max(0, count - own.x.length - 1); // the parent's last point
  const x = points.x.slice(from), mean = means(points, size, skipped).slice(from);
  let raw = { x, y: points.y.slice(from) };
  if (own.low) {
    const quarter = (own.x.at(-1) - own.x[0]) / own.x.length / 4; // each group: its least, then its largest value
    raw = { x: own.x.flatMap(step => [step - quarter, step + quarter]), y: own.low.flatMap((low, i) => [low, own.high[i]]) };
  }
  return { raw, mean: { x, y: mean }, leaves: hasParent(run) && chart.forks && x.length ? [x[0], mean[0]] : null };
}

// --- what a chart shows: uPlot's series, each with its own x, put into one table ---

function seriesOf(chart) {
  const tables = [], series = [], leaves = [];
  function add(run, { x, y }, spec) {
    const at = axisOf(run), points = x.map((step, i) => [at(step), y[i]]);
    const good = points.filter(([a, b]) => a != null && (a > 0 || !chosen.logX) && (b > 0 || !chart.log));
    if (!good.length) return;
    tables.push([good.map(([a]) => a), good.map(([, b]) => b)]);
    series.push({ points: { show: good.length === 1 }, value: (u, value) => number(value), spanGaps: true, ...spec });
  }
  for (const run of runs) {
    const { raw, mean, leaves: left } = linesOf(run, chart), smooth = chart.mean && chosen.mean > 0;
    const label = alone ? chart.title.toLowerCase() : run.name, stroke = run.color;
    if (smooth) add(run, raw, { label, stroke: stroke + "55", width: 1, class: alone ? "each" : "raw" });
    const name = alone && smooth ? `${label}, mean of ${WINDOWS[chosen.mean].toLocaleString("en")} steps` : label;
    add(run, smooth ? mean : raw, { label: name, stroke, width: 2 });
    if (left) leaves.push([run, ...left]);
    if (chart.key === "loss") {
      const stroke = alone ? "#ea580c" : run.color, points = { show: true, size: 7, fill: stroke, stroke };
      const label = alone ? "validation" : `${run.name}, validation`;
      add(run, run.curves.val_loss, { label, stroke, width: 1.5, dash: [6, 4], points });
    }
  }
  return { data: tables.length ? uPlot.join(tables) : [[]], series, leaves };
}

// The y axis: what is visible, without a few values far above the rest unless all are asked for.
function fit(chart) {
  return (u, low, high) => {
    if (low == null) return chart.log ? [0.1, 1] : [0, 1];
    const [from, to] = u.series[0].idxs, seen = [];
    if (chart.most && !chosen.all) {
      u.series.forEach((one, i) => {
        if (i && one.show) for (let k = from; k <= to; k++) if (u.data[i][k] != null) seen.push(u.data[i][k]);
      });
      seen.sort((a, b) => a - b);
      high = seen[Math.floor(chart.most * (seen.length - 1))] ?? high;
    }
    if (chart.zero) low = Math.min(0, low);
    const room = (high - low || Math.abs(low) || 1) * 0.06;
    return chart.log ? [low / 1.05, high * 1.05] : [chart.zero ? low : low - room, high + room];
  };
}

// Places of ticks on a logarithmic axis: powers of ten, or round numbers where it has fewer than two of these.
function logTicks(u, axis, low, high) {
  const ticks = [], decades = Math.log10(high / low);
  if (decades < 1) {
    const rough = (high - low) / 5, size = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find(m => size * m >= rough) * size;
    for (let k = Math.ceil(low / step); k * step <= high; k++) ticks.push(+(k * step).toPrecision(9));
    return ticks;
  }
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++)
    for (const m of decades > 3 ? [1] : [1, 2, 5]) if (m * 10 ** power >= low && m * 10 ** power <= high) ticks.push(m * 10 ** power);
  return ticks;
}

// --- what lies behind and upon the curves ---

const into = (u, x) => Math.max(u.bbox.left, Math.min(u.bbox.left + u.bbox.width, u.valToPos(x, "x", true)));

function drawBands(u) {
  if (!shaded) return;
  const at = axisOf(runs[0]), { ctx, bbox } = u;
  bands.forEach(({ first, last, kind }) => {
    const left = into(u, at(first) ?? 0), right = into(u, at(last) ?? 0);
    ctx.fillStyle = color(kinds.indexOf(kind) + 1) + "1f";
    ctx.fillRect(left, bbox.top, right - left, bbox.height);
  });
}

function drawMarks(u) {
  const { ctx, bbox } = u, ratio = devicePixelRatio, at = axisOf(runs[0]);
  ctx.save();
  ctx.font = `${11 * ratio}px system-ui, sans-serif`;
  ctx.textAlign = "right";
  let before = -Infinity, down = 0; // the name of one that is close to the one before stands below that one's
  for (const [step, kind] of alone ? runs[0].marks : []) {
    const x = u.valToPos(at(step), "x", true);
    if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
    if (x - before > 12 * ratio) down = 0;
    before = x;
    ctx.strokeStyle = ctx.fillStyle = MARKS[kind] ?? css("--soft");
    ctx.setLineDash([4 * ratio, 4 * ratio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.translate(x, bbox.top);
    ctx.rotate(-Math.PI / 2);
    ctx.fillText(kind, -4 * ratio - down, -5 * ratio);
    down += ctx.measureText(kind).width + 8 * ratio;
    ctx.setTransform(1, 0, 0, 1, 0, 0);
  }
  ctx.restore();
}

// A ring where a fork leaves its parent.
function drawLeaves(u, leaves) {
  const { ctx, bbox } = u;
  for (const [run, step, value] of leaves) {
    const x = u.valToPos(axisOf(run)(step), "x", true), y = u.valToPos(value, "y", true);
    if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
    ctx.beginPath();
    ctx.arc(x, y, 5 * devicePixelRatio, 0, 2 * Math.PI);
    ctx.strokeStyle = run.color;
    ctx.lineWidth = 2 * devicePixelRatio;
    ctx.stroke();
  }
}

// What the run was doing at the cursor: its attempt, and what happened close to it.
function tellCursor(u, line) {
  const { left } = u.cursor, at = axisOf(runs[0]), said = [];
  if (alone && left >= 0) {
    const x = u.posToVal(left, "x");
    const attempt = bands.find(({ first, last }) => at(first) <= x && x <= at(last));
    if (attempt) said.push(`attempt ${attempt.number}: ${attempt.kind} ${attempt.host}`);
    for (const [step, , words] of runs[0].marks) if (Math.abs(u.valToPos(at(step), "x") - left) < 6) said.push(words);
  }
  line.textContent = said.join("; ") || "\u00a0";
}

// The nearest point that a curve has, so that the cursor reads all of them; none beyond its ends.
function nearest(u, index, hovered) {
  const y = u.data[index];
  if (!index || y[hovered] != null) return hovered;
  let before = hovered, after = hovered;
  while (before >= 0 && y[before] == null) before--;
  while (after < y.length && y[after] == null) after++;
  if (before < 0 || after >= y.length) return hovered;
  const x = u.data[0];
  return x[hovered] - x[before] <= x[after] - x[hovered] ? before : after;
}

// --- the page ---

function make(tag, properties = {}, ...inner) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...inner);
  return element;
}

let following = false;
function zoom(low, high) {
  following = true; // one chart's zoom is that of all
  for (const u of charts) u.setScale("x", { min: low, max: high });
  following = false;
}

function draw(chart) {
  const { data, series, leaves } = seriesOf(chart);
  if (!series.length) return;
  const line = make("p", { className: "soft told" }), box = make("div");
  const card = make("figure", { className: `card ${chart.key}` });
  const caption = make("figcaption", {}, make("b", {}, chart.title), make("span", { className: "soft" }, ` ${chart.unit}`));
  if (chart.key === "loss" && shaded) caption.append(make("span", { className: "kinds" }, ...kinds.map((kind, i) =>
    make("span", {}, make("i", { className: `c${i + 1}` }), kind))));
  card.append(caption, box);
  place.append(card);
  const ink = () => css("--ink"), grid = { stroke: () => css("--grid"), width: 1 };
  const font = "12px system-ui, sans-serif", axis = { stroke: ink, font, labelFont: font, grid, ticks: grid };
  const values = (u, splits) => splits.map(value => (value == null ? "" : tick(value)));
  const log = { splits: logTicks, filter: (u, splits) => splits };
  const u = new uPlot(
    {
      width: box.clientWidth,
      height: innerWidth < 600 ? Math.min(chart.height, 280) : chart.height,
      scales: {
        x: { time: false, distr: chosen.logX ? 3 : 1, range: (u, low, high) => [low, high] },
        y: { distr: chart.log ? 3 : 1, range: fit(chart) },
      },
      series: [{ label: AXES[chosen.x], value: (u, value) => (value == null ? "–" : tick(+value.toPrecision(6))) }, ...series],
      axes: [
        { ...axis, values, label: AXES[chosen.x], labelSize: 18, size: 34, space: 70, ...(chosen.logX ? log : {}) },
        { ...axis, values, size: 62, ...(chart.log ? log : {}) },
      ],
      cursor: {
        dataIdx: nearest,
        drag: { x: true, y: false },
        sync: { key: "report", scales: ["x", null] },
        points: { size: 6 },
        bind: { dblclick: () => () => zoom(...whole) },
      },
      hooks: {
        drawClear: [drawBands],
        draw: chart.key === "loss" ? [drawMarks, u => drawLeaves(u, leaves)] : [u => drawLeaves(u, leaves)],
        setCursor: chart.key === "loss" ? [u => tellCursor(u, line)] : [],
        setScale: [(u, key) => { if (key === "x" && !following) zoom(u.scales.x.min, u.scales.x.max); }],
        // A click in the legend is for a run: its faint line goes with its mean.
        setSeries: [(u, i) => { if (i && !alone && u.series[i - 1].class === "raw" && u.series[i - 1].show !== u.series[i].show) u.setSeries(i - 1, { show: u.series[i].show }); }],
      },
    },
    data,
    box,
  );
  // A finger that moves sideways moves the cursor; up and down it moves the page.
  u.over.style.touchAction = "pan-y";
  u.over.addEventListener("touchmove", event => {
    const at = u.over.getBoundingClientRect(), touch = event.touches[0];
    u.setCursor({ left: touch.clientX - at.left, top: touch.clientY - at.top });
  }, { passive: true });
  if (chart.key === "loss" && alone) card.append(line);
  charts.push(u);
}

function drawAll() {
  for (const u of charts) u.destroy();
  charts = [];
  for (const old of place.querySelectorAll("figure")) old.remove();
  for (const chart of CHARTS) {
    chart.log = chosen.logY && (chart.key === "loss" || chart.key === "grad_norm");
    draw(chart);
  }
  const ends = charts.flatMap(u => [u.data[0][0], u.data[0].at(-1)]);
  if (!ends.length) return;
  whole = [chosen.logX ? Math.min(...ends) : 0, Math.max(...ends)];
  zoom(...whole);
}

function check(words, key) {
  const input = make("input", { type: "checkbox", checked: chosen[key] });
  input.onchange = () => { chosen[key] = input.checked; drawAll(); };
  return make("label", {}, input, ` ${words}`);
}

function tools() {
  const axis = make("select", {}, ...Object.entries(AXES).map(([value, words]) => make("option", { value }, words)));
  axis.onchange = () => { chosen.x = axis.value; drawAll(); };
  const mean = make("input", { type: "range", min: 0, max: WINDOWS.length - 1, value: chosen.mean });
  const size = make("output");
  const tell = () => { size.textContent = chosen.mean ? ` ${WINDOWS[chosen.mean].toLocaleString("en")} steps` : " none"; };
  mean.oninput = () => { chosen.mean = +mean.value; tell(); drawAll(); };
  tell();
  const part = (words, share) => {
    const button = make("button", { type: "button" }, words);
    button.onclick = () => zoom(share === 1 ? whole[0] : whole[1] - (whole[1] - whole[0]) * share, whole[1]);
    return button;
  };
  place.append(
    make("div", { className: "tools" },
      make("label", {}, "x: ", axis), check("log x", "logX"), check("log y", "logY"), check("all values", "all"),
      make("label", {}, "mean of ", mean, size),
      make("span", {}, part("all", 1), part("last half", 0.5), part("last tenth", 0.1))),
    make("p", { className: "soft" }, "Drag to zoom, double-click to go back; click a name to hide its curve."),
  );
}

// A click on a column's name sorts the table by it, a second one the other way round.
function sortable(table) {
  const [head, ...rows] = table.rows;
  [...head.cells].forEach((cell, column) => {
    cell.onclick = () => {
      const down = cell.classList.toggle("down");
      const of = row => row.cells[column].textContent.trim().replaceAll(",", "");
      rows.sort((one, two) => {
        const [a, b] = [of(one), of(two)], difference = Number(a || NaN) - Number(b || NaN);
        return (down ? 1 : -1) * (isNaN(difference) ? a.localeCompare(b, "en", { numeric: true }) : difference);
      });
      table.tBodies[0].append(...rows);
    };
  });
}

// Rows in the colors of their curves, and the parts of a whole as one bar.
for (const table of document.querySelectorAll("table.colored")) {
  const [, ...rows] = table.rows, dots = rows.map((row, i) => make("i", { className: `c${i % 10}` }));
  if (table.classList.contains("bar")) {
    const parts = dots.map(dot => dot.cloneNode());
    rows.forEach((row, i) => { parts[i].style.flexGrow = parseFloat(row.cells[2].textContent); });
    table.before(make("div", { className: "bar" }, ...parts));
  }
  rows.forEach((row, i) => row.cells[0].prepend(dots[i]));
}
tools();
drawAll();
document.querySelectorAll("table.sortable").forEach(sortable);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
new ResizeObserver(() => {
  for (const u of charts) u.setSize({ width: u.root.parentElement.clientWidth, height: u.height });
}).observe(place);
