// The chat: a conversation, streamed; one answer at a time.

import { drawCall, takeCalls, tools } from "./calls.js";
import { listChats, putAside, takeBack } from "./chats.js";
import { eventsOf, headers, keepConversation, keptConversation, problemOf, settings } from "./connection.js";
import { find, make } from "./elements.js";
import { addCopy, writeMarkdown } from "./markdown.js";
import { drawPictures, hasPictures, takePictures, textOf } from "./pictures.js";
import { askModel } from "./state.js";

export const conversation = [];
let running = null;

// ---- messages ------------------------------------------------------------------------------------

function addMessage(role, content) {
  find("welcome").hidden = true;
  const message = make("article", `message ${role}`, find("messages"));
  message.setAttribute("aria-label", role === "user" ? "You" : "Answer");
  const parts = { message, text: make("div", "text", message), reasoning: null };
  if (role === "user") {
    parts.text.textContent = textOf(content);
    drawPictures(message, content);
  } else writeMarkdown(parts.text, content);
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
  const known = tools();
  if (known.length > 0) body.tools = known;
  return body;
}

export async function ask(content) {
  conversation.push({ role: "user", content });
  addMessage("user", content);
  listChats(conversation);
  await goOn();
}

// Lets the model answer what the conversation ends with.
async function goOn() {
  for (const button of document.querySelectorAll(".again")) button.remove();
  const parts = addMessage("assistant", "");
  const answer = { content: "", reasoning: "", calls: [], began: performance.now(), first: 0,
                   usage: null, problem: "", isDue: false };
  const mine = running = new AbortController();
  showRunning(parts.message, true);
  scrollToEnd();
  try {
    await receive(answer, parts, mine.signal);
  } catch (error) {
    if (error.name !== "AbortError") answer.problem = describe(error);
  }
  if (running !== mine) return; // another chat is shown meanwhile
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

function describe(error) {
  return error instanceof TypeError ? "the server does not answer, or the connection broke" : error.message;
}

function take(chunk, answer, parts) {
  if (chunk.error) throw new Error(chunk.error.message);
  if (chunk.usage) answer.usage = chunk.usage;
  const delta = chunk.choices[0] ? chunk.choices[0].delta : {};
  takeCalls(answer.calls, delta.tool_calls);
  if (!delta.content && !delta.reasoning_content && !delta.tool_calls) return;
  answer.first = answer.first || performance.now();
  answer.content += delta.content || "";
  answer.reasoning += delta.reasoning_content || "";
  drawSoon(answer, parts);
}

function finish(answer, parts) {
  draw(answer, parts);
  const isAnswered = answer.content !== "" || answer.calls.length > 0;
  if (isAnswered) conversation.push(messageOf(answer));
  const unanswered = !isAnswered && lastRole() === "user" ? conversation.pop() : null;
  keepConversation(conversation);
  stickToEnd(() => {
    drawCalls(parts.message, answer.calls, []);
    if (answer.problem) make("p", "problem", parts.message).textContent = answer.problem;
    const foot = make("p", "about", parts.message);
    make("span", "", foot).textContent = figuresOf(answer);
    if (answer.content) addCopy(foot, () => answer.content);
    addAgain(foot, parts.message, isAnswered, unanswered);
  });
  showRunning(parts.message, false);
  if (answer.problem) askModel();
}

function messageOf(answer) {
  const message = { role: "assistant", content: answer.content };
  if (answer.calls.length > 0) Object.assign(message, { tool_calls: answer.calls });
  if (answer.reasoning) message.reasoning_content = answer.reasoning;
  return message;
}

function lastRole() {
  return conversation.length > 0 ? conversation[conversation.length - 1].role : "";
}

// Shows an answer's calls with their results; once each has one, the model goes on.
function drawCalls(place, calls, results) {
  const found = new Map(results.map((message) => [message.tool_call_id, message.content]));
  for (const call of calls) {
    drawCall(place, call, found.get(call.id), (text) => {
      found.set(call.id, text);
      if (found.size < calls.length || running) return;
      for (const { id } of calls) {
        conversation.push({ role: "tool", tool_call_id: id, content: found.get(id) });
      }
      keepConversation(conversation);
      goOn();
    });
  }
}

function figuresOf(answer) {
  if (!answer.first) return "";
  const seconds = (performance.now() - answer.first) / 1000;
  const figures = [`first token ${((answer.first - answer.began) / 1000).toFixed(2)} s`];
  const usage = answer.usage;
  if (usage && usage.completion_tokens > 1) {
    const rate = (usage.completion_tokens - 1) / seconds;
    figures.unshift(`${usage.completion_tokens} tokens`, `${rate.toFixed(1)} per second`);
  }
  if (usage) {
    const { cached_tokens: cached } = usage.prompt_tokens_details;
    figures.push(`${cached} of ${usage.prompt_tokens} prompt tokens remembered`);
  }
  return figures.join("  ·  ");
}

// Asks the same once more, in the place of an answer; `unanswered` is a message without an answer.
function addAgain(foot, message, isAnswered, unanswered) {
  const button = make("button", "quiet again", foot);
  button.type = "button";
  button.textContent = "Try again";
  button.addEventListener("click", () => {
    if (running) return;
    if (isAnswered) conversation.pop();
    message.remove();
    find("prompt").focus();
    if (unanswered) conversation.push(unanswered);
    goOn();
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
  if ((!text && !hasPictures()) || running) return;
  find("prompt").value = "";
  fitPrompt();
  const parts = takePictures();
  if (parts.length === 0) return ask(text);
  ask(text ? [...parts, { type: "text", text }] : parts);
}

// Shows the conversation from before the page was reloaded.
export function showKept() {
  show(keptConversation());
}

function show(messages) {
  messages.forEach((message, number) => {
    conversation.push(message);
    if (message.role === "tool") return;
    const parts = addMessage(message.role, message.content);
    if (message.role !== "assistant") return;
    draw({ content: message.content, reasoning: message.reasoning_content || "" }, parts);
    const rest = messages.slice(number + 1);
    const end = rest.findIndex((other) => other.role !== "tool");
    drawCalls(parts.message, message.tool_calls || [], end < 0 ? rest : rest.slice(0, end));
    addCopy(make("p", "about", parts.message), () => message.content);
  });
  listChats(conversation);
  scrollToEnd();
}

function clearConversation() {
  stop();
  running = null;
  find("send").hidden = false;
  find("stop").hidden = true;
  conversation.length = 0;
  for (const message of document.querySelectorAll(".message")) message.remove();
  find("welcome").hidden = false;
}

function replaceBy(messages) {
  clearConversation();
  show(messages);
  keepConversation(conversation);
  find("prompt").focus();
}

export function newChat() {
  putAside(conversation);
  replaceBy([]);
}

// Shows another chat of the list, by its number.
export function switchChat(number) {
  if (number === 0) return;
  const messages = takeBack(number);
  putAside(conversation);
  replaceBy(messages);
}

// Deletes the chat that is shown; the next one takes its place.
export function forgetChat() {
  replaceBy(takeBack(1));
}
