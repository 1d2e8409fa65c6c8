"use strict";
(() => {
const part = (id) => document.getElementById(id);
const { runs, gap } = JSON.parse(part("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
// Dashes and widths of the runs, whose colours page.css has: a page printed in grey can be read, too.
const STYLES = [[[], 1.6], [[7, 3], 1.6], [[2, 2], 1.8], [[9, 3, 2, 3], 1.6], [[1, 3], 2]].map(
    ([dash, width], i) => ({ colour: `--run${i}`, dash, width }));
const AXES = { step: "step", tokens: "tokens", hours: "hours of training" };
const PANELS = [
    ["loss", "Loss", "nats a token"], ["grad_norm", "Gradient norm", "before clipping", true],
    ["lr", "Learning rate", ""], ["grad_mul", "Clip ratio", "1: not clipped"],
    ["z_loss", "z-loss", "with its weight"],
    ["max_logit", "Largest attention logit", "before --qk-clip acts"],
    ["expert_load", "Load of the fullest expert", "1: all experts of a layer alike"],
    ["rank_load", "Load of the fullest rank", "of its experts, 1: all alike"],
    ["dead_experts", "Experts without a token", "of all layers"],
    ["router_entropy", "Entropy of the routers", "nats, mean of tokens and layers"],
    ["router_loss", "Losses of the routers", "with their weights"],
    ["tokens_per_second", "Speed", "tokens/s"], ["step_seconds", "Time of a step", "s"],
    ["mfu", "MFU", "share of the peak"], ["exposed_comm_seconds", "Exposed communication", "s of a step"],
    ["power_w", "Power", "W, mean of the GPUs"], ["sm_clock_mhz", "SM clock", "MHz"],
    ["joules_per_token", "Energy", "J a token"], ["gpu_utilization", "GPU utilisation", "%"],
    ["gpu_temperature_c", "Temperature", "°C, hottest GPU"],
    ["gpu_memory_gib", "Memory of the GPU", "GiB, fullest GPU"], ["memory_gib", "Memory of the run", "GiB"]];
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
    const size = Math.abs(value), digits = (x) => String(Number(x.toPrecision(6)));
    for (const [unit, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
        if (size >= unit) return digits(value / (name === "k" ? 1e3 : unit)) + name;
    return size !== 0 && size < 1e-3 ? value.toExponential(2) : digits(value);
}
function summary(label, values) {
    const known = values.filter((value) => value !== null && value !== undefined);
    if (!known.length) return `${label}: no values`;
    return `${label}: first ${figures(known[0])}, last ${figures(known.at(-1))}, ` +
        `smallest ${figures(Math.min(...known))}, largest ${figures(Math.max(...known))}`;
}

// The range of an axis; a constant stands in the middle of a tenth of its size.
function near(low, high) {
    if (low === null || high === null) return [0, 1];
    const pad = high > low ? 0.08 * (high - low) : 0.05 * (Math.abs(high) || 1);
    return [low >= 0 ? Math.max(0, low - pad) : low - pad, high + pad];
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
        const known = data.slice(1).flat().filter((value) => value !== null && value !== undefined);
        const log = logarithmic && known.length > 0 && known.every((value) => value > 0);
        const lines = { stroke: css("--grid") };
        const ends = { values: (_, at) => at.map((value) => value === null ? "" : figures(value)), stroke: css("--ink"),
            grid: lines, ticks: lines };
        const label = shared ? AXES[axis] : "step", value = (_, value) => figures(value);
        chart.plot?.destroy();
        chart.plot = new uPlot({
            width: Math.max(260, box.clientWidth), height, ms: 1,
            legend: { live: true, markers: { dash: (_, i) => markerDash(series[i - 1]?.dash ?? []) } },
            cursor: { sync: { key: shared ? "x" : title }, drag: { x: true, y: false }, focus: { prox: 20 } },
            scales: { x: { time: false }, y: log ? { distr: 3 } : { range: (_, low, high) => near(low, high) } },
            axes: [{ ...ends, label, labelSize: 18, size: 34 }, { ...ends, size: 68 }],
            series: [{ label, value }, ...series.map((s) => ({ label: s.label, value, dash: s.dash, width: s.width,
                spanGaps: true, stroke: css(s.colour) + (s.faint ? "59" : ""), class: s.faint ? "faint" : null,
                points: s.points ? { show: true, size: 7, fill: css(s.colour) } : { show: data[0].length < 3 } }))],
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
    input.addEventListener("change", () => {
        axis = name;
        for (const chart of charts) if (chart.shared) chart.make();
    });
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
        for (const [field, name, dash] of [["loss", "", [1, 4]], ["loss_bf16", " in BF16", [6, 3]],
                                           ["loss_ema", " of the EMA", [3, 3]]])
            if (loss && run.valid[field].some((value) => value !== null))
                series.push({ label: `${run.name}, validation${name}`, colour: line.colour, dash, width: 1,
                    points: true, x: () => run.valid[axis], y: () => run.valid[field] });
    });
    const usual = { grad_mul: 1, dead_experts: 0, router_loss: 0 }[field];
    if (usual !== undefined && !series.some((s) => s.y().some((value) => value !== usual && value !== null))) continue;
    const means = [...new Set(runs.filter((run) => run.smooth[field]).map((run) => run.smooth_steps))].join(", ");
    if (series.length)
        draw({ parent: loss ? part("loss") : grid, title, logarithmic, series: [...behind, ...series],
            height: loss ? 340 : 210, unit: unit + (means && `; moving mean of ${means} steps, behind it each step`) });
}
if (gap) {
    const x = () => gap.step;
    const series = gap.runs.map(([label, values]) => (
        { label, ...style(runs.findIndex((run) => run.name === label)), x, y: () => values }));
    for (const [label, sign] of gap.seeds > 1 ? [["seed band", 1], ["seed band, lower", -1]] : [])
        series.push({ label, colour: "--soft", dash: [3, 3], width: 1, x,
            y: () => gap.band.map((value) => value === null ? null : sign * value) });
    if (series.length) draw({ parent: part("loss"), title: `Loss minus that of ${gap.baseline}`,
        unit: `nats a token, moving mean of ${gap.span} steps`, series, shared: false });
}

// ---- events ----
if (runs.some((run) => run.marks.length)) {
    const details = element("details", part("panels"), { open: "" });
    const kinds = new Set(runs.flatMap((run) => run.marks.map((mark) => mark.kind)));
    element("summary", details, {}, "Events: " + [...kinds].join(", "));
    const body = element("tbody", element("table", element("div", details, { class: "events", tabindex: "0" })));
    for (const run of runs)
        for (const mark of run.marks) {
            const row = element("tr", body);
            for (const cell of [run.name, "step " + mark.step, mark.kind, mark.text]) element("td", row, {}, cell);
        }
}

// ---- heat maps of the FP8 tensors, and of the load of experts ----
const FIELDS = { amax: "amax", scale: "scale (of blocks: the median)", saturated: "saturated (share of values)",
    flushed: "flushed to zero (share)", nonfinite: "not finite (values)", scale_at_ends: "scales at an end (share)",
    load: "load (times the mean of the layer)" };
const OWN_RANGES = ["amax", "scale"];
// White to dark, or black to light on a dark page, of steady lightness: it reads in grey. Cells without a value are
// hatched.
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
const threeDigits = (value) => figures(value === null ? null : Number(value.toPrecision(3)));

for (const [key, heading, rowKind] of [["heat", "FP8 tensors: layer by step", "layer"],
    ["experts", "Load of experts: expert by step", "expert"]]) {
    const heated = runs.filter((run) => run[key]);
    if (!heated.length) continue;
    for (const run of heated)
        for (const map of Object.values(run[key].maps))
            map.bytes = Uint8Array.from(atob(map.data), (c) => c.charCodeAt(0));
    const section = element("section", part("panels"), { "aria-label": heading });
    element("h2", section, {}, heading);
    const bar = element("p", section);
    const pick = (label, entries) => {
        const box = element("select", element("label", bar, {}, label + " "));
        for (const [value, text] of entries) element("option", box, { value }, text);
        return box;
    };
    const ofRun = pick("Run", heated.map((run, i) => [i, run.name])), ofField = pick("Show", []);
    const scale = element("canvas", bar, { class: "scale", width: "160", height: "12", "aria-hidden": "true" });
    const range = element("span", bar, { class: "soft" });
    const reading = element("p", section, { class: "reading", "aria-live": "polite" },
        "Point at a cell, or move with the arrow keys; a click or Enter draws its row below.");
    const maps = element("div", section, { class: "heats" });
    const detail = element("div", section, { class: "grid", id: key === "heat" ? "tensor" : key });
    const heatNow = () => heated[ofRun.value][key];
    const valueAt = (map, group, row, column) =>
        valueOf(map.ranges[group], map.bytes[row * heatNow().columns.length + column]);
    const layerOf = (row) => /^\d+(?=\.)/.exec(heatNow().names[row])?.[0] ?? "";

    // The curves of the tensor of a row of the maps.
    function tensor(group, row) {
        const heat = heatNow();
        for (let i = charts.length - 1; i >= 0; i--)
            if (charts[i].tensor === key) { charts[i].plot.destroy(); charts.splice(i, 1); }
        detail.textContent = "";
        for (const [field, map] of Object.entries(heat.maps)) {
            const values = heat.columns.map((_, column) => valueAt(map, group, row, column));
            const x = () => heat.columns.map((column) => column.last);
            draw({ parent: detail, title: `${heat.names[row]}: ${FIELDS[field]}`, unit: heat.formats[row],
                shared: false, height: 170, series: [{ label: FIELDS[field], ...style(0), x, y: () => values }] }).tensor = key;
        }
        detail.querySelector(".chart")?.focus({ preventScroll: true });
    }
    // Text of a cell: the tensor, the steps, and all values.
    function cellText(group, row, column) {
        const heat = heatNow(), { first, last } = heat.columns[column];
        const values = Object.entries(heat.maps).map(([field, map]) =>
            `${FIELDS[field]} ${threeDigits(valueAt(map, group, row, column))}`);
        const format = heat.formats[row] && ` (${heat.formats[row]})`;
        return `${heat.names[row]}${format}, ${first === last ? "step" : `steps ${first} to`} ${last}: ` +
            values.join(", ");
    }
    // The map of a group of tensors, such as all qkv.x, which has `count` rows from `from` on.
    function heatMap(group, [name, count], from) {
        const heat = heatNow(), map = heat.maps[ofField.value], columns = heat.columns.length;
        const box = element("figure", maps);
        // Shares have one range for all maps; amax and scale differ from role to role, so each map has its own.
        const own = OWN_RANGES.includes(ofField.value);
        const span = [...new Set(map.ranges[group].map(threeDigits))].join(" to ");
        element("h3", box, {}, name + (own ? ` (${span})` : ""));
        const ends = (kind, first, last) => {   // of an axis
            const labels = element("div", box, { class: "ends " + kind });
            for (const label of [first, last]) element("span", labels, {}, label);
        };
        ends("rows", layerOf(from) && `${rowKind} ${layerOf(from)}`, count > 1 ? layerOf(from + count - 1) : "");
        const canvas = element("canvas", box, { width: columns, height: count, tabindex: "0", role: "img" });
        ends("columns", "step " + heat.columns[0].first, columns > 1 ? String(heat.columns.at(-1).last) : "");
        canvas.style.height = Math.min(160, Math.max(24, 5 * count)) + "px";
        const image = new ImageData(columns, count);
        let high = 0, at = from;
        map.bytes.subarray(from * columns, (from + count) * columns).forEach((level, i) => {
            const row = Math.floor(i / columns);
            image.data.set([...shade(level, (row + i % columns) % 2), 255], 4 * i);
            if (level !== 255 && level >= high) { high = level; at = from + row; }
        });
        canvas.getContext("2d").putImageData(image, 0, 0);
        canvas.setAttribute("aria-label", `${name}, ${count} ${rowKind}s by ${columns} steps of ${FIELDS[ofField.value]}; ` +
            `the largest, ${figures(valueOf(map.ranges[group], high))}, in ${heat.names[at]}`);
        let row = 0, column = 0;
        const go = (toRow, toColumn) => {
            row = Math.min(count - 1, Math.max(0, Math.floor(toRow)));
            column = Math.min(columns - 1, Math.max(0, Math.floor(toColumn)));
            reading.textContent = cellText(group, from + row, column);
        };
        canvas.addEventListener("mousemove", (event) => {
            const area = canvas.getBoundingClientRect();
            go((event.clientY - area.top) / area.height * count, (event.clientX - area.left) / area.width * columns);
        });
        canvas.addEventListener("click", () => tensor(group, from + row));
        canvas.addEventListener("focus", () => go(row, column));
        canvas.addEventListener("keydown", (event) => {
            const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
            if (event.key === "Enter") tensor(group, from + row);
            else if (move) go(row + move[0], column + move[1]);
            else return;
            event.preventDefault();
        });
    }
    function show() {
        const heat = heatNow(), own = OWN_RANGES.includes(ofField.value);
        const span = own ? "the range beside each name" : heat.maps[ofField.value].ranges[0].map(figures).join(" to ");
        range.textContent = ` ${span}, logarithmic; hatched: no value`;
        const context = scale.getContext("2d");
        for (let x = 0; x < 160; x++) {
            context.fillStyle = `rgb(${shade(x / 159 * 254)})`;
            context.fillRect(x, 0, 1, 12);
        }
        maps.textContent = "";
        let from = 0;
        heat.groups.forEach((group, number) => { heatMap(number, group, from); from += group[1]; });
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
    timer = setTimeout(() => {
        for (const { plot } of charts)
            plot.setSize({ width: Math.max(260, plot.root.parentElement.clientWidth), height: plot.height });
    }, 100);
});
})();
