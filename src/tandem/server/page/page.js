// The page of `tandem serve`: a chat, and a live view of where experts run.
// It needs nothing but the server that it came from.

import { ask, fitPrompt, forgetChat, isAnswering, newChat, sendPrompt, showKept, stop, switchChat } from "./chat.js";
import { eventsOf, headers, keep, settings } from "./connection.js";
import { find } from "./elements.js";
import { animate, leaveGrid, moveCell, pointAtCell, savePicture, takeSnapshot } from "./live.js";
import { choosePictures } from "./pictures.js";
import { askModel } from "./state.js";

// ---- settings -----------------------------------------------------------------------------------

const SETTINGS = ["system", "temperature", "top_p", "max_tokens", "seed", "tools", "key"];

function showSettings() {
  for (const name of SETTINGS) find(`set-${name}`).value = settings[name];
  find("settings").showModal();
}

function keepSettings() {
  keep(Object.fromEntries(SETTINGS.map((name) => [name, find(`set-${name}`).value])));
  askModel();
}

// ---- the live view -------------------------------------------------------------------------------

async function watch() {
  for (;;) {
    try {
      const response = await fetch("live", { headers: headers() });
      if (response.ok) {
        askModel();
        for await (const data of eventsOf(response)) takeSnapshot(JSON.parse(data));
      }
    } catch { /* tried again below */ }
    askModel();
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

// ---- keys and buttons ---------------------------------------------------------------------------

function seeLive(isLive) {
  document.body.classList.toggle("sees-live", isLive);
  find("view-live").setAttribute("aria-selected", String(isLive));
  find("view-chat").setAttribute("aria-selected", String(!isLive));
  animate();
}

find("composer").addEventListener("submit", (event) => { event.preventDefault(); sendPrompt(); });
find("prompt").addEventListener("input", fitPrompt);
find("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    sendPrompt();
  }
});
find("prompt").addEventListener("paste", (event) => {
  if (event.clipboardData.files.length > 0) choosePictures([...event.clipboardData.files]);
});
find("attach").addEventListener("click", () => find("picture-files").click());
find("picture-files").addEventListener("change", () => {
  choosePictures([...find("picture-files").files]);
  find("picture-files").value = "";
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !find("settings").open) stop();
});
find("stop").addEventListener("click", stop);
find("open-settings").addEventListener("click", showSettings);
find("settings").addEventListener("close", keepSettings);
find("clear").addEventListener("click", newChat);
find("forget").addEventListener("click", forgetChat);
find("chats").addEventListener("change", () => switchChat(Number(find("chats").value)));
for (const idea of document.querySelectorAll(".idea")) {
  idea.addEventListener("click", () => { if (!isAnswering()) ask(idea.textContent); });
}
find("view-chat").addEventListener("click", () => seeLive(false));
find("view-live").addEventListener("click", () => seeLive(true));
find("save-picture").addEventListener("click", savePicture);
find("grid").addEventListener("pointermove", pointAtCell);
find("grid").addEventListener("pointerleave", leaveGrid);
find("grid").addEventListener("blur", leaveGrid);
find("grid").addEventListener("keydown", moveCell);
addEventListener("resize", animate);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", animate);
showKept();
watch();
