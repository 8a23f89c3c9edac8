/* Small charts by layer, drawn as SVG at the element's own width: lines with their names at the end, or bars. */
const number = value => (Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(2)).replace("-", "−");
const escapeText = text => String(text).replace(/[&<>"]/g, letter => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[letter]);

function niceStep(span) {
  const power = 10 ** Math.floor(Math.log10(span / 3 || 1));
  return [1, 2, 5, 10].map(factor => factor * power).find(step => span / step <= 4) ?? power;
}

/* chart(element, { title, y, xs, lines: [{ name, values, color, dash }], bars: [{ name, values, color }], note, chosen })
   A value of null is a gap. `percent`: the axis counts shares. */
function chart(element, { title, y, xs, lines = [], bars = [], note = "", percent = false, width = element.clientWidth || 320, height = 220 }) {
  const series = [...lines, ...bars];
  const box = { left: 46, right: lines.length ? 92 : 12, top: 14, bottom: 38 };
  const values = series.flatMap(one => one.values).filter(Number.isFinite);
  const low = Math.min(0, ...values), high = Math.max(...values, low + (percent ? 0.01 : 0.1));
  const step = niceStep(high - low), bottom = low, top = Math.ceil(high / step) * step;
  const inner = width - box.left - box.right, pad = bars.length ? 0.5 : 0;
  const px = x => box.left + inner * (x - xs[0] + pad) / (xs.at(-1) - xs[0] + 2 * pad || 1);
  const py = value => box.top + (height - box.top - box.bottom) * (top - value) / (top - bottom);
  const written = value => (percent ? `${+(100 * value).toPrecision(3)}%` : String(+value.toPrecision(4)).replace("-", "−"));
  const parts = [];
  for (let tick = Math.ceil(low / step) * step; tick <= top + step / 2; tick += step)
    parts.push(`<line class="grid" x1="${box.left}" x2="${width - box.right}" y1="${py(tick)}" y2="${py(tick)}"/>`,
               `<text class="tick" x="${box.left - 6}" y="${py(tick) + 4}" text-anchor="end">${written(+tick.toPrecision(12))}</text>`);
  const every = Math.ceil(xs.length / (inner / 26));
  for (const x of xs) if ((x - xs[0]) % every === 0) parts.push(`<text class="tick" x="${px(x)}" y="${height - box.bottom + 16}" text-anchor="middle">${x}</text>`);
  parts.push(`<text class="tick" x="${box.left + inner / 2}" y="${height - 6}" text-anchor="middle">layer</text>`);
  const slot = 0.8 * inner / (xs.length || 1) / (bars.length || 1);
  bars.forEach(({ values, color }, group) => values.forEach((value, place) => {
    if (!Number.isFinite(value)) return;
    const left = px(xs[place]) + (group - bars.length / 2) * slot + 1, [upper, lower] = [py(Math.max(value, 0)), py(Math.min(value, 0))];
    parts.push(`<rect class="bar" fill="${color}" x="${left}" y="${upper}" width="${Math.max(slot - 2, 1)}" height="${Math.max(lower - upper, 1)}" rx="2"/>`);
  }));
  const labels = [];
  for (const { name, values, color, dash } of lines) {
    let pen = "M";
    const path = values.map((value, place) => {
      const point = Number.isFinite(value) ? `${pen}${px(xs[place]).toFixed(1)} ${py(value).toFixed(1)}` : "";
      pen = Number.isFinite(value) ? "L" : "M";
      return point;
    });
    parts.push(`<path class="line" d="${path.join("")}" stroke="${color}" stroke-dasharray="${dash ?? ""}"/>`);
    const last = values.findLast(Number.isFinite);
    if (last !== undefined && name) labels.push({ name, color, y: py(last) });
  }
  labels.sort((a, b) => a.y - b.y).forEach((label, place) => { // names do not overlap
    if (place) label.y = Math.max(label.y, labels[place - 1].y + 14);
    const over = height - box.bottom + 4 - 14 * (labels.length - 1 - place);
    label.y = Math.min(label.y, over);
    parts.push(`<text class="name" fill="${label.color}" x="${width - box.right + 7}" y="${label.y + 4}">${escapeText(label.name)}</text>`);
  });
  const said = series.map(({ name, values }) => `${name}: ${values.map(value => (Number.isFinite(value) ? written(value) : "none")).join(", ")}`).join("; ");
  element.innerHTML = `<h3>${escapeText(title)}</h3><p class="unit">${escapeText(note || y)}</p>
    <svg width="${width}" height="${height}" role="img" aria-label="${escapeText(`${title}, ${y}. ${note || said}`)}">${note ? "" : parts.join("")}</svg>`;
  const unit = element.querySelector(".unit");
  element.onpointermove = event => { // values of the layer under the pointer, in place of the unit
    const x = xs.reduce((best, x) => Math.abs(px(x) - event.offsetX) < Math.abs(px(best) - event.offsetX) ? x : best, xs[0]), place = xs.indexOf(x);
    if (!note) unit.textContent = `layer ${x}: ${series.filter(one => Number.isFinite(one.values[place])).map(one => `${one.name || one.about} ${written(one.values[place])}`).join(", ")}`;
  };
  element.onpointerleave = () => { unit.textContent = note || y; };
}
