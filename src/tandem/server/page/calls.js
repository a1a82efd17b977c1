// Calls of tools: what the model may call, what it called, and what the user says came of it.

import { settings } from "./connection.js";
import { make } from "./elements.js";

// Returns the tools of the settings as the API takes them; throws an error in words.
export function tools() {
  if (!settings.tools.trim()) return [];
  let found;
  try {
    found = JSON.parse(settings.tools);
  } catch (error) {
    throw new Error(`the tools in the settings are no JSON: ${error.message}`);
  }
  if (!Array.isArray(found)) throw new Error("the tools in the settings are no list; begin with [");
  return found.map((tool) => (tool.function ? tool : { type: "function", function: tool }));
}

// Adds what a stream brings of calls to those that are there.
export function takeCalls(calls, deltas) {
  for (const delta of deltas || []) {
    const call = calls[delta.index] = calls[delta.index] || { type: "function", function: { name: "", arguments: "" } };
    call.id = delta.id || call.id;
    call.function.name += delta.function.name || "";
    call.function.arguments += delta.function.arguments || "";
  }
}

// Shows a call. Without its result there is a form for one, which `onResult` receives.
export function drawCall(place, call, result, onResult) {
  const section = make("section", "call", place);
  section.setAttribute("aria-label", `Call of ${call.function.name}`);
  make("h3", "", section).textContent = call.function.name;
  make("pre", "", section).textContent = pretty(call.function.arguments);
  if (result !== undefined) return drawResult(section, result);
  const form = make("form", "result-form", section);
  const label = make("label", "", form);
  label.append("What came of it");
  const text = make("textarea", "", label);
  text.rows = 2;
  const send = make("button", "primary", form);
  send.textContent = "Give result";
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    form.remove();
    drawResult(section, text.value);
    onResult(text.value);
  });
  return section;
}

function drawResult(section, text) {
  const details = make("details", "", section);
  make("summary", "", details).textContent = "Result";
  make("pre", "", details).textContent = text;
  return section;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
