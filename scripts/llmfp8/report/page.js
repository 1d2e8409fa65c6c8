"use strict";
(() => {
const { runs, gap } = JSON.parse(document.getElementById("data").textContent);
const host = document.getElementById("panels");
// Runs differ in lightness, dash and width, so that a page printed in grey can be read.
const STYLES = [["#1a3f7a", [], 1.6], ["#c2570c", [7, 3], 1.6], ["#2b8a3e", [2, 2], 1.8], ["#8338a8", [9, 3, 2, 3], 1.6],
                ["#555", [1, 3], 2]];
const AXES = { step: "step", tokens: "tokens", hours: "hours of training" };
const PANELS = [
    ["loss", "Loss", "nats a token"], ["grad_norm", "Gradient norm", "before clipping", true],
    ["lr", "Learning rate", ""], ["grad_mul", "Clip ratio", "1: not clipped"],
    ["tokens_per_second", "Speed", "tokens/s"], ["step_seconds", "Time of a step", "s"],
    ["mfu", "MFU", "share of the peak"], ["exposed_comm_seconds", "Exposed communication", "s of a step"],
    ["power_w", "Power", "W, mean of the GPUs"], ["sm_clock_mhz", "SM clock", "MHz"],
    ["joules_per_token", "Energy", "J a token"], ["gpu_utilization", "GPU utilisation", "%"],
    ["gpu_temperature_c", "Temperature", "°C, hottest GPU"], ["gpu_memory_gib", "Memory of the GPU", "GiB, fullest GPU"],
    ["memory_gib", "Memory of the run", "GiB"]];
const charts = [];
let axis = "step";

function element(name, parent, attributes = {}, text = "") {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text;
    parent.append(made);
    return made;
}
const style = (i) => STYLES[i % STYLES.length];
const markerDash = (dash) => !dash.length ? "solid" : dash[0] > 2 ? "dashed" : "dotted";   // of a CSS border
function figures(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size >= 1e5 && Number.isInteger(value) && size < 1e9) return value.toLocaleString("en");
    return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(3) : String(Number(value.toPrecision(6)));
}
function tick(value) {
    if (value === null) return "";
    const size = Math.abs(value);
    for (const [unit, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
        if (size >= unit) return Number((value / (name === "k" ? 1e3 : unit)).toPrecision(4)) + name;
    return size !== 0 && size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(6)));
}
function summary(label, values) {
    const known = values.filter((value) => value !== null && value !== undefined);
    if (!known.length) return `${label}: no values`;
    let low = known[0], high = known[0];
    for (const value of known) { low = Math.min(low, value); high = Math.max(high, value); }
    return `${label}: first ${figures(known[0])}, last ${figures(known[known.length - 1])}, ` +
        `smallest ${figures(low)}, largest ${figures(high)}`;
}

// The range of an axis; a constant stands in the middle of a tenth of its size.
function near(low, high) {
    if (low === null || high === null) return [0, 1];
    const pad = high > low ? 0.08 * (high - low) : 0.05 * (Math.abs(high) || 1);
    return [low >= 0 ? Math.max(0, low - pad) : low - pad, high + pad];
}

let zooming = false;
function zoom(from) {
    if (zooming) return;
    zooming = true;
    const { min, max } = from.scales.x;
    for (const chart of charts) if (chart.plot !== from && chart.shared) chart.plot.setScale("x", { min, max });
    zooming = false;
}

// series: [{label, x, y, style, points}] with x and y functions of the axis.
function draw({ parent, title, unit, series, logarithmic = false, height = 210, shared = true, full = false }) {
    const figure = element("figure", parent, full ? { class: "full" } : {});
    const caption = element("figcaption", figure, {}, title + " ");
    element("small", caption, {}, unit);
    const box = element("div", figure, { class: "chart", tabindex: "0", role: "img" });
    const chart = { plot: null, shared };
    let data;
    chart.make = () => {
        const tables = series.map((s) => [s.x(), s.y()]);
        data = tables.length === 1 ? tables[0] : uPlot.join(tables);
        const known = data.slice(1).flat().filter((value) => value > 0).length;
        const log = logarithmic && known > 0 && !data.slice(1).flat().some((value) => value <= 0 && value !== null && value !== undefined);
        chart.plot?.destroy();
        chart.plot = new uPlot({
            width: Math.max(260, box.clientWidth), height, ms: 1,
            legend: { live: true, markers: { dash: (_, i) => markerDash(series[i - 1]?.style[1] ?? []) } },
            cursor: { sync: { key: shared ? "x" : title }, drag: { x: true, y: false }, focus: { prox: 20 } },
            scales: { x: { time: false }, y: log ? { distr: 3 } : { range: (_, low, high) => near(low, high) } },
            axes: [{ values: (_, at) => at.map(tick), label: shared ? AXES[axis] : "step", labelSize: 18, size: 34, grid: { stroke: "#e3e6ea" } },
                   { values: (_, at) => at.map(tick), size: 62, grid: { stroke: "#e3e6ea" } }],
            series: [{ label: shared ? AXES[axis] : "step", value: (_, value) => figures(value) },
                ...series.map((s) => ({ label: s.label, stroke: s.style[0], dash: s.style[1], width: s.points ? 1 : s.style[2],
                    spanGaps: true, points: s.points ? { show: true, size: 7, fill: s.style[0] } : { show: data[0].length < 3 },
                    value: (_, value) => figures(value) }))],
            hooks: { setScale: [(plot, key) => { if (key === "x" && shared && plot.status === 1) zoom(plot); }] },
        }, data, box);
        box.setAttribute("aria-label", `${title}. ` + series.map((s, i) => summary(s.label, data[i + 1])).join(". "));
    };
    chart.make();
    charts.push(chart);
    return chart;
}

// ---- controls ----
const controls = element("div", host, { class: "controls" });
const choice = element("fieldset", controls);
element("legend", choice, {}, "Horizontal axis");
for (const name of Object.keys(AXES)) {
    const label = element("label", choice);
    const input = element("input", label, { type: "radio", name: "axis", value: name });
    input.checked = name === axis;
    input.addEventListener("change", () => { axis = name; for (const chart of charts) if (chart.shared) chart.make(); });
    label.append(" " + AXES[name]);
}
element("span", controls, { class: "soft" }, "Drag over a chart to zoom, double click to see all.");

// ---- curves ----
const grid = element("div", host, { class: "grid" });
for (const [field, title, unit, logarithmic] of PANELS) {
    const series = [];
    runs.forEach((run, i) => {
        if (run.curves[field]) series.push({ label: run.name, style: style(i), x: () => run.axes[axis], y: () => run.curves[field] });
        if (field === "loss" && run.valid.step.length)
            series.push({ label: run.name + " validation", style: [style(i)[0], [1, 4], 1], points: true,
                x: () => run.valid[axis], y: () => run.valid.loss });
    });
    if (field === "grad_mul" && !series.some((s) => s.y().some((value) => value !== 1 && value !== null))) continue;
    if (series.length) draw({ parent: grid, title, unit, series, logarithmic, full: field === "loss", height: field === "loss" ? 320 : 210 });
}
if (gap) {
    const series = gap.runs.map(([name, values], i) => ({ label: name, style: style(i + 1), x: () => gap.step, y: () => values }));
    if (gap.seeds > 1)
        for (const sign of [1, -1])
            series.push({ label: sign > 0 ? "seed band" : "seed band, lower", style: ["#8a929c", [3, 3], 1], x: () => gap.step,
                y: () => gap.band.map((value) => value === null ? null : sign * value) });
    if (series.length) draw({ parent: grid, title: `Gap to ${gap.baseline}`, unit: "training loss, moving mean of 21 points", series, shared: false, full: true });
}

// ---- events ----
if (runs.some((run) => run.marks.length)) {
    const details = element("details", element("div", grid, { class: "full" }), { open: "" });
    element("summary", details, {}, "Events: resumes, skipped steps, warnings, evaluations, checkpoints");
    const body = element("tbody", element("table", details));
    for (const run of runs)
        for (const mark of run.marks) {
            const row = element("tr", body);
            for (const cell of [run.name, "step " + mark.step, mark.kind, mark.text]) element("td", row, {}, cell);
        }
}

// ---- heat maps of the FP8 tensors ----
const FIELDS = { amax: "amax", scale: "scale (of blocks: the median)", saturated: "saturated, share of values",
    flushed: "flushed to zero, share of values", nonfinite: "values that are not finite",
    scale_at_ends: "block scales at an end of their range, share" };
// In a legend, and beside the values of a cell.
const SHORT = { nonfinite: "not finite", flushed: "flushed to zero", scale_at_ends: "scales at an end" };
const OWN_RANGES = ["amax", "scale"];
const shade = (level) => {   // white to dark, of falling lightness: it reads in grey
    const t = level / 254;
    return [255 - 225 * t, 250 - 215 * Math.sqrt(t) * (0.35 + 0.65 * t), 240 - 160 * t * t - 20 * t].map(Math.round);
};
function valueOf([low, high], level) {
    if (level === 255) return null;
    if (level === 0) return 0;
    return low === high ? low : low * (high / low) ** ((level - 1) / 253);
}
// Of a group of tensors, such as all qkv.x.
const groupOf = (heat, row) => {
    let group = 0;
    for (let end = heat.groups[0][1]; row >= end; end += heat.groups[group][1]) group++;
    return group;
};

const threeDigits = (value) => figures(value === null ? null : Number(value.toPrecision(3)));
const rangeText = (range) => [...new Set(range.map(threeDigits))].join(" to ");

const heated = runs.filter((run) => run.heat);
if (heated.length) {
    const part = element("section", host, { "aria-label": "FP8 tensors" });
    element("h2", part, {}, "FP8 tensors: layer by step");
    const bar = element("p", part);
    const pick = (label, entries) => {
        const box = element("select", element("label", bar, {}, label + " "));
        for (const [value, text] of entries) element("option", box, { value }, text);
        return box;
    };
    const ofRun = pick("Run", heated.map((run, i) => [i, run.name])), ofField = pick("Show", []);
    const scale = element("canvas", bar, { class: "scale", width: "160", height: "12", "aria-hidden": "true" });
    const range = element("span", bar, { class: "soft" });
    const reading = element("p", part, { class: "reading", "aria-live": "polite" }, "Point at a cell, or move with the arrow keys; a click or Enter draws the tensor below.");
    const maps = element("div", part, { class: "heats" });
    const detail = element("div", part, { class: "grid", id: "tensor" });
    const context = scale.getContext("2d");
    for (let x = 0; x < 160; x++) { context.fillStyle = `rgb(${shade(x / 159 * 254)})`; context.fillRect(x, 0, 1, 12); }
    const decoded = new Map();
    const bytes = (map) => {
        if (!decoded.has(map)) decoded.set(map, Uint8Array.from(atob(map.data), (c) => c.charCodeAt(0)));
        return decoded.get(map);
    };
    const heatNow = () => heated[ofRun.value].heat;

    function tensor(row) {
        const heat = heatNow(), columns = heat.columns.length;
        for (let i = charts.length - 1; i >= 0; i--) if (charts[i].tensor) { charts[i].plot.destroy(); charts.splice(i, 1); }
        detail.textContent = "";
        for (const field of Object.keys(heat.maps)) {
            const map = heat.maps[field], data = bytes(map);
            const values = Array.from({ length: columns }, (_, i) => valueOf(map.ranges[groupOf(heat, row)], data[row * columns + i]));
            draw({ parent: detail, title: `${heat.names[row]}: ${FIELDS[field]}`, unit: heat.formats[row], shared: false, height: 170,
                series: [{ label: SHORT[field] ?? field, style: STYLES[0], x: () => heat.columns.map((column) => column.last), y: () => values }] }).tensor = true;
        }
        detail.querySelector(".chart")?.focus({ preventScroll: true });
    }
    function show() {
        const heat = heatNow(), map = heat.maps[ofField.value], data = bytes(map), columns = heat.columns.length;
        range.textContent = ` ${OWN_RANGES.includes(ofField.value) ? "the range beside each name" : map.ranges[0].map(figures).join(" to ")}, logarithmic; hatched: no value`;
        maps.textContent = "";
        let begin = 0;
        heat.groups.forEach(([group, count], number) => {
            const from = begin, mapRange = map.ranges[number];
            begin += count;
            const box = element("figure", maps);
            element("h3", box, {}, group);
            const canvas = element("canvas", box, { width: columns, height: count, tabindex: "0", role: "img" });
            canvas.style.height = Math.min(160, Math.max(24, 5 * count)) + "px";
            const image = new ImageData(columns, count);
            let high = 0, at = from;
            const levels = data.subarray(from * columns, begin * columns);
            levels.forEach((level, i) => {
                if (level === 255) return;
                if (level >= high) { high = level; at = from + Math.floor(i / columns); }
            });
            // Shares have one range for all maps; amax and scale differ from role to role, so each map has its own.
            if (OWN_RANGES.includes(ofField.value)) box.firstChild.textContent += ` (${rangeText(mapRange)})`;
            for (let row = 0; row < count; row++)
                for (let column = 0; column < columns; column++) {
                    const level = levels[row * columns + column];
                    const colour = level === 255 ? ((row + column) % 2 ? [205, 205, 205] : [235, 235, 235])
                        : shade(level);
                    image.data.set([...colour, 255], 4 * (row * columns + column));
                }
            canvas.getContext("2d").putImageData(image, 0, 0);
            canvas.setAttribute("aria-label", `${group}, ${count} layers by ${columns} steps of ${FIELDS[ofField.value]}; the largest, ${figures(valueOf(mapRange, high))}, in ${heat.names[at]}`);
            let cell = [0, 0];
            const read = () => {
                const [row, column] = cell, steps = heat.columns[column];
                const of = steps.first === steps.last ? `step ${steps.last}` : `steps ${steps.first} to ${steps.last}`;
                const value = (map) => valueOf(map.ranges[number], bytes(map)[(from + row) * columns + column]);
                reading.textContent = `${heat.names[from + row]} (${heat.formats[from + row]}), ${of}: ` + Object.keys(heat.maps).map((field) =>
                    `${SHORT[field] ?? field} ${threeDigits(value(heat.maps[field]))}`).join(", ");
            };
            canvas.addEventListener("mousemove", (event) => {
                const area = canvas.getBoundingClientRect();
                cell = [Math.min(count - 1, Math.max(0, Math.floor((event.clientY - area.top) / area.height * count))),
                        Math.min(columns - 1, Math.max(0, Math.floor((event.clientX - area.left) / area.width * columns)))];
                read();
            });
            canvas.addEventListener("click", () => tensor(from + cell[0]));
            canvas.addEventListener("focus", read);
            canvas.addEventListener("keydown", (event) => {
                const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
                if (event.key === "Enter") tensor(from + cell[0]);
                else if (move) { cell = [Math.min(count - 1, Math.max(0, cell[0] + move[0])), Math.min(columns - 1, Math.max(0, cell[1] + move[1]))]; read(); }
                else return;
                event.preventDefault();
            });
        });
    }
    function fields() {
        const old = ofField.value;
        ofField.textContent = "";
        for (const field of Object.keys(heatNow().maps)) element("option", ofField, { value: field }, FIELDS[field]);
        if (heatNow().maps[old]) ofField.value = old;
        show();
    }
    ofRun.parentElement.hidden = heated.length < 2;
    ofRun.addEventListener("change", fields);
    ofField.addEventListener("change", show);
    fields();
}

let timer = 0;
addEventListener("resize", () => {
    clearTimeout(timer);
    timer = setTimeout(() => { for (const chart of charts) chart.plot.setSize({ width: Math.max(260, chart.plot.root.parentElement.clientWidth), height: chart.plot.height }); }, 100);
});
})();
