// Several chats: the one that is shown, and those beside it, until the tab ends.

import { find } from "./elements.js";
import { textOf } from "./pictures.js";

const LONGEST_NAME = 40;
let others = kept();

function kept() {
  try {
    return JSON.parse(sessionStorage.getItem("tandem-chats") || "[]");
  } catch {
    return [];
  }
}

function keep() {
  try {
    sessionStorage.setItem("tandem-chats", JSON.stringify(others));
  } catch { /* a browser without storage forgets, and so does one that is full */ }
}

function nameOf(messages) {
  const first = messages.find((message) => message.role === "user");
  const name = first ? textOf(first.content).trim().split("\n")[0] || "Picture" : "New chat";
  return name.length > LONGEST_NAME ? `${name.slice(0, LONGEST_NAME)}…` : name;
}

// Shows the names of all chats; alone a chat needs no list.
export function listChats(current) {
  const list = find("chats");
  list.replaceChildren(...[current, ...others].map((messages, number) => {
    const option = document.createElement("option");
    option.value = String(number);
    option.textContent = nameOf(messages);
    return option;
  }));
  list.value = "0";
  list.hidden = find("forget").hidden = others.length === 0;
}

// Puts a chat beside the one that is shown next.
export function putAside(messages) {
  if (messages.length > 0) others.unshift([...messages]);
  keep();
}

// Takes a chat from beside, by its place in the list.
export function takeBack(number) {
  const [messages] = others.splice(number - 1, 1);
  keep();
  return messages || [];
}
