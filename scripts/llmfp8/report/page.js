"use strict";
(() => {
const part = (id) => document.getElementById(id);
const { runs, gap } = JSON.parse(part("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
// Dashes and widths of the runs, whose colours page.css has: a page printed in grey can be read, too.
const STYLES = [[[], 1.6], [[7, 3], 1.6], [[2, 2], 1.8], [[9, 3, 2, 3], 1.6], [[1, 3], 2]];
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
const style = (i) => ({ colour: `--run${i % STYLES.length}`, dash: STYLES[i % STYLES.length][0], width: STYLES[i % STYLES.length][1] });
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

// series: [{label, x, y, colour, dash, width, points, faint}] with x and y functions of the axis.
function draw({ parent, title, unit, series, logarithmic = false, height = 210, shared = true }) {
    const figure = element("figure", parent);
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
            legend: { live: true, markers: { dash: (_, i) => markerDash(series[i - 1]?.dash ?? []) } },
            cursor: { sync: { key: shared ? "x" : title }, drag: { x: true, y: false }, focus: { prox: 20 } },
            scales: { x: { time: false }, y: log ? { distr: 3 } : { range: (_, low, high) => near(low, high) } },
            axes: [{ label: shared ? AXES[axis] : "step", labelSize: 18, size: 34 }, { size: 68 }].map((more) => (
                { values: (_, at) => at.map(tick), stroke: css("--ink"), grid: { stroke: css("--grid") }, ticks: { stroke: css("--grid") }, ...more })),
            series: [{ label: shared ? AXES[axis] : "step", value: (_, value) => figures(value) },
                ...series.map((s) => ({ label: s.label, stroke: css(s.colour) + (s.faint ? "59" : ""), dash: s.dash, width: s.width, class: s.faint ? "faint" : null,
                    spanGaps: true, points: s.points ? { show: true, size: 7, fill: css(s.colour) } : { show: data[0].length < 3 },
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
const choice = element("fieldset", part("controls"));
element("legend", choice, {}, "Horizontal axis");
for (const name of Object.keys(AXES)) {
    const label = element("label", choice);
    const input = element("input", label, { type: "radio", name: "axis", value: name });
    input.checked = name === axis;
    input.addEventListener("change", () => { axis = name; for (const chart of charts) if (chart.shared) chart.make(); });
    label.append(" " + AXES[name]);
}
element("span", part("controls"), { class: "soft" }, "Drag over a chart to zoom, double click to see all.");

// ---- curves: the loss first, smoothed ones in front of the values of each step ----
const grid = element("div", part("panels"), { class: "grid" });
for (const [field, title, unit, logarithmic] of PANELS) {
    const loss = field === "loss", behind = [], series = [];
    runs.forEach((run, i) => {
        const line = { label: run.name, ...style(i), x: () => run.axes[axis], y: () => run.curves[field] };
        if (run.smooth[field]) {
            behind.push({ ...line, label: run.name + ", each step", dash: [], width: 1, faint: true });
            series.push({ ...line, y: () => run.smooth[field] });
        } else if (run.curves[field]) series.push(line);
        if (loss && run.valid.step.length)
            series.push({ label: run.name + ", validation", colour: line.colour, dash: [1, 4], width: 1, points: true,
                x: () => run.valid[axis], y: () => run.valid.loss });
    });
    if (field === "grad_mul" && !series.some((s) => s.y().some((value) => value !== 1 && value !== null))) continue;
    const means = [...new Set(runs.filter((run) => run.smooth[field]).map((run) => run.smooth_steps))].join(", ");
    if (series.length)
        draw({ parent: loss ? part("loss") : grid, title, unit: unit + (means && `; moving mean of ${means} steps, behind it each step`), logarithmic,
            series: [...behind, ...series], height: loss ? 340 : 210 });
}
if (gap) {
    const series = gap.runs.map(([name, values], i) => ({ label: name, ...style(i + 1), x: () => gap.step, y: () => values }));
    if (gap.seeds > 1)
        for (const sign of [1, -1])
            series.push({ label: sign > 0 ? "seed band" : "seed band, lower", colour: "--soft", dash: [3, 3], width: 1, x: () => gap.step,
                y: () => gap.band.map((value) => value === null ? null : sign * value) });
    if (series.length) draw({ parent: part("loss"), title: `Loss minus that of ${gap.baseline}`,
        unit: "nats a token, moving mean of 21 points", series, shared: false });
}

// ---- events ----
if (runs.some((run) => run.marks.length)) {
    const kinds = runs.flatMap((run) => run.marks.map((mark) => mark.kind));
    const usual = ["evaluation", "checkpoint", "note", "stop"];
    const details = element("details", part("panels"), kinds.every((kind) => usual.includes(kind)) ? {} : { open: "" });
    element("summary", details, {}, "Events: " + [...new Set(kinds)].map((kind) =>
        `${kind} (${kinds.filter((other) => other === kind).length})`).join(", "));
    const body = element("tbody", element("table", element("div", details, { class: "events", tabindex: "0" })));
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
// White to dark, or black to light on a dark page, of steady lightness: it reads in grey. Cells without a value are hatched.
const shade = (level, hatch = 0) => {
    const t = level / 254;
    const colour = level === 255 ? Array(3).fill(235 - 30 * hatch)
        : [255 - 225 * t, 250 - 215 * Math.sqrt(t) * (0.35 + 0.65 * t), 240 - 160 * t * t - 20 * t].map(Math.round);
    return dark.matches ? colour.map((value) => 255 - value) : colour;
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
    const section = element("section", part("panels"), { "aria-label": "FP8 tensors" });
    element("h2", section, {}, "FP8 tensors: layer by step");
    const bar = element("p", section);
    const pick = (label, entries) => {
        const box = element("select", element("label", bar, {}, label + " "));
        for (const [value, text] of entries) element("option", box, { value }, text);
        return box;
    };
    const ofRun = pick("Run", heated.map((run, i) => [i, run.name])), ofField = pick("Show", []);
    const scale = element("canvas", bar, { class: "scale", width: "160", height: "12", "aria-hidden": "true" });
    const range = element("span", bar, { class: "soft" });
    const reading = element("p", section, { class: "reading", "aria-live": "polite" }, "Point at a cell, or move with the arrow keys; a click or Enter draws the tensor below.");
    const maps = element("div", section, { class: "heats" });
    const detail = element("div", section, { class: "grid", id: "tensor" });
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
                series: [{ label: SHORT[field] ?? field, ...style(0), x: () => heat.columns.map((column) => column.last), y: () => values }] }).tensor = true;
        }
        detail.querySelector(".chart")?.focus({ preventScroll: true });
    }
    function show() {
        const heat = heatNow(), map = heat.maps[ofField.value], data = bytes(map), columns = heat.columns.length;
        range.textContent = ` ${OWN_RANGES.includes(ofField.value) ? "the range beside each name" : map.ranges[0].map(figures).join(" to ")}, logarithmic; hatched: no value`;
        const context = scale.getContext("2d");
        for (let x = 0; x < 160; x++) { context.fillStyle = `rgb(${shade(x / 159 * 254)})`; context.fillRect(x, 0, 1, 12); }
        maps.textContent = "";
        let begin = 0;
        heat.groups.forEach(([group, count], number) => {
            const from = begin, mapRange = map.ranges[number];
            begin += count;
            const box = element("figure", maps);
            element("h3", box, {}, group);
            // The ends of the axes: the layers above and below, and the steps.
            const layers = element("div", box, { class: "ends rows" }), layerOf = (row) => /^\d+(?=\.)/.exec(heat.names[row])?.[0] ?? "";
            element("span", layers, {}, layerOf(from) && "layer " + layerOf(from));
            element("span", layers, {}, count > 1 ? layerOf(begin - 1) : "");
            const canvas = element("canvas", box, { width: columns, height: count, tabindex: "0", role: "img" });
            const steps = element("div", box, { class: "ends columns" });
            element("span", steps, {}, "step " + heat.columns[0].first);
            element("span", steps, {}, columns > 1 ? String(heat.columns[columns - 1].last) : "");
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
                for (let column = 0; column < columns; column++)
                    image.data.set([...shade(levels[row * columns + column], (row + column) % 2), 255], 4 * (row * columns + column));
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
    dark.addEventListener("change", show);
    fields();
}

dark.addEventListener("change", () => { for (const chart of charts) chart.make(); });
let timer = 0;
addEventListener("resize", () => {
    clearTimeout(timer);
    timer = setTimeout(() => { for (const chart of charts) chart.plot.setSize({ width: Math.max(260, chart.plot.root.parentElement.clientWidth), height: chart.plot.height }); }, 100);
});
})();
