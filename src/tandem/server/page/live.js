// The live view: where every expert lives and runs, how busy CPU, GPU and link are, hit rate, speed.

import { find, make } from "./elements.js";

const GLOW_SECONDS = 1.1;
const HISTORY = 150; // snapshots, five a second
const LEAST_HISTORY = 40; // before so many have come, lines begin at the left
const reducesMotion = matchMedia("(prefers-reduced-motion: reduce)");

export const live = {
  layers: 0, experts: 0, where: null, glow: null, byDevice: null, uses: null, device: null,
  steps: [], speeds: [], rates: [], cursor: null, at: 0, isDrawing: false,
};

function bytesOf(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

export function takeSnapshot(snapshot) {
  const cells = snapshot.layers * snapshot.experts;
  if (live.layers !== snapshot.layers || live.experts !== snapshot.experts) {
    Object.assign(live, { layers: snapshot.layers, experts: snapshot.experts,
      glow: new Float32Array(cells), byDevice: new Float32Array(cells),
      uses: new Uint32Array(cells) });
  }
  live.where = bytesOf(snapshot.where);
  live.device = snapshot.device;
  const host = bytesOf(snapshot.by_host), device = bytesOf(snapshot.by_device);
  let numUsed = 0;
  for (let i = 0; i < cells; i++) {
    const uses = host[i] + device[i];
    if (!uses) continue;
    numUsed++;
    live.glow[i] = 1;
    live.byDevice[i] = device[i] / uses;
    live.uses[i] += uses;
  }
  live.steps = [...live.steps, ...snapshot.steps].slice(-48);
  push(live.speeds, snapshot.tokens_per_second);
  if (snapshot.active) push(live.rates, snapshot.hits / snapshot.active);
  writeFigures(snapshot, numUsed, cells);
  animate();
}

function push(list, value) {
  list.push(value);
  if (list.length > HISTORY) list.shift();
}

function writeFigures(snapshot, numUsed, cells) {
  find("speed").textContent = snapshot.tokens_per_second.toFixed(snapshot.tokens_per_second < 10 ? 1 : 0);
  const onDevice = live.where.reduce((sum, place) => sum + (place === 2), 0);
  if (snapshot.device) {
    const rate = live.rates.length ? live.rates[live.rates.length - 1] : 0;
    find("hits").textContent = `${Math.round(rate * 100)} %`;
  } else {
    find("hits-name").textContent = "Experts used now";
    const share = cells ? numUsed / cells : 0;
    find("hits").textContent = `${Math.round(100 * share)} %`;
    push(live.rates, share);
  }
  const where = snapshot.device ? `${onDevice} of ${cells} on the device` : "all on the CPU";
  find("grid-note").textContent = cells
    ? `${live.layers} layers × ${live.experts} experts, ${where}`
    : "a dense model: no experts to share";
  find("grid").setAttribute("aria-label",
    `${live.layers} layers of ${live.experts} experts, ${where}, ${numUsed} used just now`);
}

function context(canvas, height) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth;
  if (height) canvas.style.height = `${height}px`;
  const tall = height || canvas.clientHeight;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(tall * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  return { pen, width, height: tall };
}

function colours() {
  const style = getComputedStyle(document.documentElement);
  const found = {};
  for (const name of ["ink", "soft", "line", "host", "device", "link", "host-rest", "device-rest"]) {
    found[name] = style.getPropertyValue(`--${name}`).trim();
  }
  return found;
}

function mixed(a, b, share) {
  const part = (text, i) => parseInt(text.slice(1 + 2 * i, 3 + 2 * i), 16);
  const one = (i) => Math.round(part(a, i) + (part(b, i) - part(a, i)) * share);
  return `rgb(${one(0)} ${one(1)} ${one(2)})`;
}

// The longer side lies across: layers of a small model, experts of a large one.
function gridShape(width) {
  const turned = live.layers > live.experts;
  const columns = turned ? live.layers : live.experts, rows = turned ? live.experts : live.layers;
  const pitch = width / columns;
  const tall = Math.max(3, Math.min(pitch, 22));
  return { turned, columns, rows, pitch, tall };
}

function drawGrid(shades) {
  const canvas = find("grid");
  if (!live.layers || !canvas.clientWidth) return;
  const shape = gridShape(canvas.clientWidth);
  const { pen } = context(canvas, shape.rows * shape.tall);
  const gap = shape.pitch > 6 ? 1.5 : 0.5, round = shape.pitch > 6 ? 3 : 1;
  for (let layer = 0; layer < live.layers; layer++) {
    for (let expert = 0; expert < live.experts; expert++) {
      const i = layer * live.experts + expert, place = live.where[i];
      const x = (shape.turned ? layer : expert) * shape.pitch;
      const y = (shape.turned ? expert : layer) * shape.tall;
      const rest = place === 2 ? shades["device-rest"] : shades["host-rest"];
      const lit = live.byDevice[i] > 0.5 ? shades.device : shades.host;
      pen.fillStyle = live.glow[i] > 0.02 ? mixed(rest, lit, live.glow[i]) : rest;
      pen.beginPath();
      pen.roundRect(x + gap / 2, y + gap / 2, shape.pitch - gap, shape.tall - gap, round);
      pen.fill();
      if (place === 1) outline(pen, shades.link);
      if (live.cursor && live.cursor[0] === layer && live.cursor[1] === expert) outline(pen, shades.ink);
    }
  }
}

function outline(pen, colour) {
  pen.strokeStyle = colour;
  pen.lineWidth = 1.5;
  pen.stroke();
}

const PROCESSORS = [["cpu", "CPU", "host"], ["device", "Device", "device"], ["link", "Link", "link"]];

function drawProcessors(shades) {
  const canvas = find("processors");
  if (!canvas.clientWidth) return;
  const processors = live.device ? PROCESSORS : PROCESSORS.slice(0, 1);
  const tall = 42, left = 54, right = 44;
  const { pen, width } = context(canvas, processors.length * tall);
  const wide = (width - left - right) / 48;
  pen.font = "12.5px system-ui, sans-serif";
  pen.textBaseline = "middle";
  processors.forEach(([name, label, shade], row) => {
    const base = (row + 1) * tall - 5, most = tall - 10;
    pen.fillStyle = shades.soft;
    pen.textAlign = "left";
    pen.fillText(label, 0, base - most / 2);
    pen.fillStyle = shades.line;
    pen.fillRect(left, base, width - left - right, 1);
    pen.fillStyle = shades[shade];
    let busy = 0, all = 0;
    live.steps.forEach((step, i) => {
      const share = step.all > 0 ? Math.min(1, step[name] / step.all) : 0;
      busy += Math.min(step[name], step.all);
      all += step.all;
      pen.fillRect(left + i * wide + 0.5, base - most * share, Math.max(1, wide - 1), most * share);
    });
    pen.fillStyle = shades.soft;
    pen.textAlign = "right";
    if (all > 0) pen.fillText(`${Math.round(100 * busy / all)} %`, width, base - most / 2);
  });
  describeProcessors(canvas);
}

function describeProcessors(canvas) {
  const last = live.steps[live.steps.length - 1];
  if (!last) return;
  find("processors-note").textContent = `last ${live.steps.length} steps, now ${last.all.toFixed(1)} ms${live.device === "emulated" ? " on the simulated GPU's clock" : ""}`;
  canvas.setAttribute("aria-label", `Last step ${last.all} ms: CPU ${last.cpu}, device ${last.device}, link ${last.link} ms`);
}

function drawLine(id, values, shade, most) {
  const { pen, width, height } = context(find(id));
  if (values.length < 2 || !width) return;
  const top = most || Math.max(...values, 1e-9) * 1.1;
  const last = Math.max(LEAST_HISTORY, values.length) - 1;
  const point = (value, i) => [width * i / last, height - 2 - (height - 4) * Math.min(1, value / top)];
  pen.beginPath();
  values.forEach((value, i) => pen.lineTo(...point(value, i)));
  pen.strokeStyle = shade;
  pen.lineWidth = 1.75;
  pen.lineJoin = "round";
  pen.stroke();
  pen.lineTo(point(0, values.length - 1)[0], height);
  pen.lineTo(0, height);
  pen.globalAlpha = 0.12;
  pen.fillStyle = shade;
  pen.fill();
}

export function animate() {
  if (live.isDrawing) return;
  live.isDrawing = true;
  live.at = performance.now();
  requestAnimationFrame(draw);
}

function draw(now) {
  const passed = Math.max(0, now - live.at) / 1000;
  live.at = now;
  let isLit = false;
  if (live.glow) {
    for (let i = 0; i < live.glow.length; i++) {
      live.glow[i] = Math.max(0, live.glow[i] - passed / GLOW_SECONDS);
      isLit = isLit || live.glow[i] > 0;
    }
  }
  const shades = colours();
  drawGrid(shades);
  drawProcessors(shades);
  drawLine("speed-line", live.speeds, shades.soft);
  drawLine("hits-line", live.rates, live.device ? shades.device : shades.host, 1);
  live.isDrawing = isLit && !reducesMotion.matches;
  if (live.isDrawing) requestAnimationFrame(draw);
}

// ---- looking at one expert -----------------------------------------------------------------------

function showCell(layer, expert) {
  if (layer < 0 || expert < 0 || layer >= live.layers || expert >= live.experts) return;
  live.cursor = [layer, expert];
  const i = layer * live.experts + expert;
  const place = ["in CPU memory", "arriving", "on the device"][live.where[i]];
  find("cell").textContent = `layer ${layer}, expert ${expert}: ${place}, used ${live.uses[i]}×`;
  animate();
}

export function pointAtCell(event) {
  const canvas = find("grid"), box = canvas.getBoundingClientRect();
  if (!live.layers) return;
  const shape = gridShape(canvas.clientWidth);
  const column = Math.floor((event.clientX - box.left) / shape.pitch);
  const row = Math.floor((event.clientY - box.top) / shape.tall);
  if (shape.turned) showCell(column, row);
  else showCell(row, column);
}

export function moveCell(event) {
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const move = moves[event.key];
  if (!move || !live.layers) return;
  event.preventDefault();
  const [layer, expert] = live.cursor || [0, 0];
  const { turned } = gridShape(find("grid").clientWidth);
  showCell(layer + (turned ? move[0] : move[1]), expert + (turned ? move[1] : move[0]));
}

export function leaveGrid() {
  live.cursor = null;
  find("cell").textContent = "";
  animate();
}

// Returns the figures, experts and processors that are seen, below each other on one canvas.
export function picture() {
  const parts = [find("grid"), find("processors")].filter((part) => part.width && part.height);
  const whole = document.createElement("canvas"), line = 32 * (devicePixelRatio || 1);
  whole.width = Math.max(1, ...parts.map((part) => part.width));
  whole.height = parts.reduce((sum, part) => sum + part.height + line / 2, line);
  const pen = whole.getContext("2d"), style = getComputedStyle(document.body);
  pen.fillStyle = style.backgroundColor;
  pen.fillRect(0, 0, whole.width, whole.height);
  pen.fillStyle = style.color;
  pen.font = `${line / 2}px sans-serif`;
  const hits = `${find("hits-name").textContent} ${find("hits").textContent}`;
  pen.fillText(`Tandem: ${find("speed").textContent} tokens a second, ${hits}`, line / 4, line * 0.7);
  let top = line;
  for (const part of parts) {
    pen.drawImage(part, 0, top);
    top += part.height + line / 2;
  }
  return whole;
}

export function savePicture() {
  const link = make("a");
  link.download = "tandem-experts.png";
  link.href = picture().toDataURL("image/png");
  link.click();
}
