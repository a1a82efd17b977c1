// The chat: a conversation, streamed; one answer at a time.

import { eventsOf, headers, keepConversation, keptConversation, problemOf, settings } from "./connection.js";
import { find, make } from "./elements.js";
import { addCopy, writeMarkdown } from "./markdown.js";
import { askModel } from "./state.js";

export const conversation = [];
let running = null;

// ---- messages ------------------------------------------------------------------------------------

function addMessage(role, text) {
  find("welcome").hidden = true;
  const message = make("article", `message ${role}`, find("messages"));
  message.setAttribute("aria-label", role === "user" ? "You" : "Answer");
  const parts = { message, text: make("div", "text", message), reasoning: null };
  if (role === "user") parts.text.textContent = text;
  else writeMarkdown(parts.text, text);
  return parts;
}

function stickToEnd(change) {
  const list = find("messages");
  const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 60;
  change();
  if (isAtEnd) list.scrollTop = list.scrollHeight;
}

function scrollToEnd() {
  find("messages").scrollTop = find("messages").scrollHeight;
}

// The text is drawn once a frame, however fast it comes.
function drawSoon(answer, parts) {
  if (answer.isDue) return;
  answer.isDue = true;
  requestAnimationFrame(() => draw(answer, parts));
}

function draw(answer, parts) {
  answer.isDue = false;
  stickToEnd(() => {
    if (answer.reasoning && !parts.reasoning) {
      const details = make("details");
      make("summary", "", details).textContent = "Reasoning";
      parts.reasoning = make("div", "text plain", details);
      parts.message.prepend(details);
    }
    if (parts.reasoning) parts.reasoning.textContent = answer.reasoning;
    writeMarkdown(parts.text, answer.content);
  });
}

// ---- asking --------------------------------------------------------------------------------------

function bodyOf() {
  const messages = settings.system ? [{ role: "system", content: settings.system }] : [];
  const body = { messages: [...messages, ...conversation], stream: true,
                 stream_options: { include_usage: true } };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if (settings[name] !== "") body[name] = Number(settings[name]);
  }
  return body;
}

export async function ask(text) {
  for (const button of document.querySelectorAll(".again")) button.remove();
  conversation.push({ role: "user", content: text });
  addMessage("user", text);
  const parts = addMessage("assistant", "");
  const answer = { content: "", reasoning: "", began: performance.now(), first: 0, tokens: 0,
                   problem: "", isDue: false };
  const mine = running = new AbortController();
  showRunning(parts.message, true);
  scrollToEnd();
  try {
    await receive(answer, parts, mine.signal);
  } catch (error) {
    if (error.name !== "AbortError") answer.problem = said(error);
  }
  if (running !== mine) return; // the conversation was cleared meanwhile
  running = null;
  finish(answer, parts);
}

async function receive(answer, parts, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST", headers: headers(), body: JSON.stringify(bodyOf()), signal,
  });
  if (!response.ok) throw new Error(await problemOf(response));
  for await (const data of eventsOf(response)) {
    if (data === "[DONE]") return;
    take(JSON.parse(data), answer, parts);
  }
  throw new Error("the connection broke before the answer was complete");
}

function said(error) {
  return error instanceof TypeError ? "the server does not answer, or the connection broke" : error.message;
}

function take(chunk, answer, parts) {
  if (chunk.error) throw new Error(chunk.error.message);
  if (chunk.usage) answer.tokens = chunk.usage.completion_tokens;
  const delta = chunk.choices[0] ? chunk.choices[0].delta : {};
  if (!delta.content && !delta.reasoning_content) return;
  answer.first = answer.first || performance.now();
  answer.content += delta.content || "";
  answer.reasoning += delta.reasoning_content || "";
  drawSoon(answer, parts);
}

function finish(answer, parts) {
  draw(answer, parts);
  const isAnswered = answer.content !== "";
  if (isAnswered) conversation.push({ role: "assistant", content: answer.content });
  const asked = isAnswered ? null : conversation.pop();
  keepConversation(conversation);
  stickToEnd(() => {
    if (answer.problem) make("p", "problem", parts.message).textContent = answer.problem;
    const foot = make("p", "about", parts.message);
    make("span", "", foot).textContent = figuresOf(answer);
    if (isAnswered) addCopy(foot, () => answer.content);
    addAgain(foot, parts.message, asked);
  });
  showRunning(parts.message, false);
  if (answer.problem) askModel();
}

function figuresOf(answer) {
  if (!answer.first) return "";
  const seconds = (performance.now() - answer.first) / 1000;
  const figures = [`first token ${((answer.first - answer.began) / 1000).toFixed(2)} s`];
  if (answer.tokens > 1) {
    figures.unshift(`${answer.tokens} tokens`, `${((answer.tokens - 1) / seconds).toFixed(1)} per second`);
  }
  return figures.join("  ·  ");
}

// Asks the same once more, in the place of an answer; `asked` is what was left unanswered.
function addAgain(foot, message, asked) {
  const button = make("button", "quiet again", foot);
  button.type = "button";
  button.textContent = "Try again";
  button.addEventListener("click", () => {
    if (running) return;
    if (!asked) conversation.pop();
    const text = (asked || conversation.pop()).content;
    message.previousElementSibling.remove();
    message.remove();
    find("prompt").focus();
    ask(text);
  });
}

function showRunning(message, isRunning) {
  message.classList.toggle("busy", isRunning);
  message.setAttribute("aria-busy", String(isRunning));
  find("send").hidden = isRunning;
  find("stop").hidden = !isRunning;
}

export function isAnswering() {
  return running !== null;
}

export function stop() {
  if (running) running.abort();
}

// ---- the prompt, and the conversation as a whole -------------------------------------------------

export function fitPrompt() {
  const prompt = find("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

export function sendPrompt() {
  const text = find("prompt").value.trim();
  if (!text || running) return;
  find("prompt").value = "";
  fitPrompt();
  ask(text);
}

// Shows the conversation from before the page was reloaded.
export function showKept() {
  for (const { role, content } of keptConversation()) {
    conversation.push({ role, content });
    const { message } = addMessage(role, content);
    if (role === "assistant") addCopy(make("p", "about", message), () => content);
  }
  scrollToEnd();
}

export function clearConversation() {
  stop();
  running = null;
  find("send").hidden = false;
  find("stop").hidden = true;
  conversation.length = 0;
  keepConversation(conversation);
  for (const message of document.querySelectorAll(".message")) message.remove();
  find("welcome").hidden = false;
  find("prompt").focus();
}
