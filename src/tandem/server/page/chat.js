// The chat: a conversation, streamed; one answer at a time.

import { eventsOf, headers, problemOf, settings } from "./connection.js";
import { find, make } from "./elements.js";

export const conversation = [];
let running = null;

// Code, in blocks and in lines, is all the markup that is shown; everything else is plain text.
function writeText(target, text) {
  target.replaceChildren();
  text.split(/```(?:[^\n`]*\n)?/).forEach((part, i) => {
    if (i % 2) {
      make("code", "", make("pre", "", target)).textContent = part.replace(/\n$/, "");
      return;
    }
    part.split(/`([^`\n]+)`|\*\*([^*\n]+)\*\*/).forEach((piece, j) => {
      if (!piece) return;
      if (j % 3 === 0) target.append(piece);
      else make(j % 3 === 1 ? "code" : "strong", "", target).textContent = piece;
    });
  });
}

function addMessage(role) {
  find("welcome").hidden = true;
  const message = make("article", `message ${role}`, find("messages"));
  message.setAttribute("aria-label", role === "user" ? "You" : "Answer");
  const parts = { message, text: null, reasoning: null };
  parts.text = make("div", "text", message);
  return parts;
}

function stickToEnd(change) {
  const list = find("messages");
  const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 60;
  change();
  if (isAtEnd) list.scrollTop = list.scrollHeight;
}

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
  conversation.push({ role: "user", content: text });
  writeText(addMessage("user").text, text);
  const parts = addMessage("assistant");
  parts.message.classList.add("busy");
  find("messages").scrollTop = find("messages").scrollHeight;
  running = new AbortController();
  showRunning(true);
  const answer = { content: "", reasoning: "", began: performance.now(), first: 0, tokens: 0 };
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(bodyOf()), signal: running.signal,
    });
    if (!response.ok) throw new Error(await problemOf(response));
    for await (const data of eventsOf(response)) {
      if (data === "[DONE]") break;
      take(JSON.parse(data), answer, parts);
    }
  } catch (error) {
    if (error.name !== "AbortError") make("p", "problem", parts.message).textContent = error.message;
  }
  parts.message.classList.remove("busy");
  if (answer.content) conversation.push({ role: "assistant", content: answer.content });
  else conversation.pop();
  tellAbout(answer, parts);
  running = null;
  showRunning(false);
}

function take(chunk, answer, parts) {
  if (chunk.error) throw new Error(chunk.error.message);
  if (chunk.usage) answer.tokens = chunk.usage.completion_tokens;
  const delta = chunk.choices[0] ? chunk.choices[0].delta : {};
  if (!delta.content && !delta.reasoning_content) return;
  answer.first = answer.first || performance.now();
  stickToEnd(() => {
    if (delta.reasoning_content) {
      answer.reasoning += delta.reasoning_content;
      if (!parts.reasoning) {
        const details = make("details");
        make("summary", "", details).textContent = "Reasoning";
        parts.reasoning = make("div", "text", details);
        parts.message.prepend(details);
      }
      parts.reasoning.textContent = answer.reasoning;
    }
    if (delta.content) {
      answer.content += delta.content;
      writeText(parts.text, answer.content);
    }
  });
}

function tellAbout(answer, parts) {
  if (!answer.first) return;
  const seconds = (performance.now() - answer.first) / 1000;
  const said = [`first token ${((answer.first - answer.began) / 1000).toFixed(2)} s`];
  if (answer.tokens > 1) {
    said.unshift(`${answer.tokens} tokens`, `${((answer.tokens - 1) / seconds).toFixed(1)} per second`);
  }
  stickToEnd(() => { make("p", "about", parts.message).textContent = said.join("  ·  "); });
}

function showRunning(isRunning) {
  find("send").hidden = isRunning;
  find("stop").hidden = !isRunning;
}

export function isAnswering() {
  return running !== null;
}

export function stop() {
  if (running) running.abort();
}

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

export function clearConversation() {
  stop();
  conversation.length = 0;
  for (const message of document.querySelectorAll(".message")) message.remove();
  find("welcome").hidden = false;
  find("prompt").focus();
}
