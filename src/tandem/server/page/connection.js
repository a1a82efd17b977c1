// How the page speaks to the server that it came from: its settings, its key, its events.

export const settings = { system: "", temperature: "", top_p: "", max_tokens: "512", seed: "", tools: "",
                          key: "" };
try {
  Object.assign(settings, JSON.parse(localStorage.getItem("tandem") || "{}"));
} catch { /* a browser without storage forgets */ }

// Changes some settings and keeps them for the next visit.
export function keep(changes) {
  Object.assign(settings, changes);
  try {
    localStorage.setItem("tandem", JSON.stringify(settings));
  } catch { /* as above */ }
}

// The conversation outlives a reload, and ends with the tab.
export function keepConversation(messages) {
  try {
    sessionStorage.setItem("tandem-chat", JSON.stringify(messages));
  } catch { /* as above, or it is too long */ }
}

export function keptConversation() {
  try {
    return JSON.parse(sessionStorage.getItem("tandem-chat") || "[]");
  } catch {
    return [];
  }
}

export function headers() {
  const found = { "Content-Type": "application/json" };
  if (settings.key) found.Authorization = `Bearer ${settings.key}`;
  return found;
}

export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ")) yield part.slice(6);
    }
  }
}

export async function problemOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}
