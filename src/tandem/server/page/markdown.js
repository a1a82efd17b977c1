// Markdown as models write it, drawn by making elements: no text ever becomes markup.
//
// A text that grows is drawn block by block; only the blocks that changed are drawn again.

import { make } from "./elements.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^(#{1,6})\s+(.+?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const TABLE_LINE = /^\s*\|?(\s*:?-+:?\s*\|)+\s*:?-*:?\s*$/;
const INLINE = new RegExp([
  /(`+)([^`](?:.*?[^`])?)\1(?!`)/, // 1, 2: code
  /\*\*(?=\S)(.+?)\*\*(?!\*)/, // 3: strong
  /(?<![*\w])\*(?=[^\s*])([^*]+?)\*(?![*\w])/, // 4: emphasis
  /(?<![\w_])_(?=[^\s_])([^_]+?)_(?![\w_])/, // 5: emphasis
  /~~(?=\S)(.+?)~~/, // 6: struck out
  /\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/, // 7, 8: a link
  /(https?:\/\/[^\s<>"']*[^\s<>"'.,;:!?)\]])/, // 9: an address
].map((part) => part.source).join("|"), "gs");

// Draws a text into an element, whose children stay where their source is the same.
export function writeMarkdown(target, text) {
  const blocks = blocksOf(text);
  blocks.forEach((block, i) => {
    const source = JSON.stringify(block);
    const old = target.children[i];
    if (old && old.source === source) return;
    const element = DRAW[block.kind](block);
    element.source = source;
    if (old) old.replaceWith(element);
    else target.append(element);
  });
  while (target.children.length > blocks.length) target.lastChild.remove();
}

// ---- blocks --------------------------------------------------------------------------------------

function blocksOf(text) {
  const lines = text.split("\n"), blocks = [];
  for (let i = 0; i < lines.length;) {
    if (!lines[i].trim()) { i++; continue; }
    const [block, next] = blockAt(lines, i);
    blocks.push(block);
    i = next;
  }
  return blocks;
}

function blockAt(lines, i) {
  const fence = lines[i].match(FENCE), heading = lines[i].match(HEADING);
  if (fence) return codeAt(lines, i, fence);
  if (heading) return [{ kind: "heading", level: heading[1].length, text: heading[2] }, i + 1];
  if (RULE.test(lines[i])) return [{ kind: "rule" }, i + 1];
  if (ITEM.test(lines[i])) return linesAt(lines, i, "list", continuesList);
  if (/^\s*>/.test(lines[i])) return linesAt(lines, i, "quote", (line) => /^\s*>/.test(line));
  if (isTable(lines, i)) return linesAt(lines, i, "table", (line) => line.includes("|"));
  return linesAt(lines, i, "paragraph", (line, at) => line.trim() && !begins(lines, at));
}

function codeAt(lines, i, fence) {
  const code = [];
  for (i++; i < lines.length; i++) {
    const end = lines[i].trim();
    if (end.startsWith(fence[1]) && !end.replaceAll(fence[1][0], "")) return [codeBlock(fence, code), i + 1];
    code.push(lines[i]);
  }
  return [codeBlock(fence, code), i]; // it is still being written
}

function codeBlock(fence, code) {
  return { kind: "code", language: fence[2], text: code.join("\n") };
}

function linesAt(lines, first, kind, goesOn) {
  let i = first + 1;
  while (i < lines.length && goesOn(lines[i], i, lines)) i++;
  return [{ kind, lines: lines.slice(first, i) }, i];
}

function begins(lines, i) {
  return [FENCE, HEADING, RULE, ITEM].some((start) => start.test(lines[i])) ||
    /^\s*>/.test(lines[i]) || isTable(lines, i);
}

function continuesList(line, i, lines) {
  if (line.trim()) return ITEM.test(line) || /^\s{2,}/.test(line);
  const next = lines[i + 1] || "";
  return ITEM.test(next) || /^\s{2,}\S/.test(next);
}

function isTable(lines, i) {
  return lines[i].includes("|") && TABLE_LINE.test(lines[i + 1] || "");
}

// ---- elements ------------------------------------------------------------------------------------

const DRAW = {
  paragraph: ({ lines }) => withInline(make("p"), lines.join("\n")),
  heading: ({ level, text }) => withInline(make(`h${Math.min(6, level + 2)}`), text),
  rule: () => make("hr"),
  quote: ({ lines }) => {
    const quote = make("blockquote");
    writeMarkdown(quote, lines.map((line) => line.replace(/^\s*> ?/, "")).join("\n"));
    return quote;
  },
  code: drawCode,
  list: drawList,
  table: drawTable,
};

function drawCode({ language, text }) {
  const block = make("div", "code-block");
  const head = make("div", "code-head", block);
  make("span", "", head).textContent = language || "code";
  addCopy(head, () => text);
  make("code", "", make("pre", "", block)).textContent = text;
  return block;
}

function drawList({ lines }) {
  const indent = lines[0].match(ITEM)[1].length;
  const ordered = /\d/.test(lines[0].match(ITEM)[2]);
  const list = make(ordered ? "ol" : "ul");
  if (ordered) list.start = parseInt(lines[0].match(ITEM)[2], 10);
  for (let i = 0; i < lines.length;) {
    const item = lines[i].match(ITEM), inner = [];
    for (i++; i < lines.length; i++) {
      const next = lines[i].match(ITEM);
      if (next && next[1].length <= indent + 1) break;
      inner.push(lines[i]);
    }
    drawItem(make("li", "", list), item[3], inner);
  }
  return list;
}

function drawItem(element, text, inner) {
  withInline(make("span", "", element), text);
  const written = inner.filter((line) => line.trim());
  if (!written.length) return;
  const margin = Math.min(...written.map((line) => line.match(/^\s*/)[0].length));
  const below = make("div", "", element);
  writeMarkdown(below, inner.map((line) => line.slice(margin)).join("\n"));
}

function drawTable({ lines }) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const scroller = make("div", "table"), table = make("table", "", scroller);
  const head = make("tr", "", make("thead", "", table)), body = make("tbody", "", table);
  for (const cell of cells(lines[0])) withInline(make("th", "", head), cell);
  for (const line of lines.slice(2)) {
    const row = make("tr", "", body);
    for (const cell of cells(line)) withInline(make("td", "", row), cell);
  }
  return scroller;
}

function withInline(target, text) {
  let done = 0;
  for (const found of text.matchAll(INLINE)) {
    if (found.index < done) continue;
    target.append(text.slice(done, found.index));
    drawInline(target, found);
    done = found.index + found[0].length;
  }
  target.append(text.slice(done));
  return target;
}

function drawInline(target, found) {
  const [, , code, strong, starred, lined, struck, label, link, address] = found;
  if (code !== undefined) make("code", "", target).textContent = code;
  else if (strong !== undefined) withInline(make("strong", "", target), strong);
  else if (struck !== undefined) withInline(make("s", "", target), struck);
  else if (link || address) drawLink(target, link || address, label || address);
  else withInline(make("em", "", target), starred ?? lined);
}

function drawLink(target, address, label) {
  const link = make("a", "", target);
  link.href = address; // http and https alone get here
  link.textContent = label;
  link.target = "_blank";
  link.rel = "noopener noreferrer";
}

// ---- copying -------------------------------------------------------------------------------------

export function addCopy(parent, textOf) {
  const button = make("button", "quiet copy", parent);
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    button.textContent = await copied(textOf()) ? "Copied" : "Not copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}

// Over plain HTTP from another machine there is no clipboard API; the older way still works.
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = make("textarea", "hidden", document.body);
    area.value = text;
    area.select();
    const isDone = document.execCommand("copy");
    area.remove();
    return isDone;
  }
}
