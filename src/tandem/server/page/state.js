// What the page says about the server: its model, being loaded, gone.

import { headers, problemOf } from "./connection.js";
import { find } from "./elements.js";
import { offerPictures } from "./pictures.js";

let asking = null;

function showState(state, text) {
  find("dot").className = `dot ${state}`;
  find("model").textContent = text;
}

// Asks the server for its state, and again while it is not ready; one request at a time.
export function askModel() {
  asking = asking || ask().finally(() => { asking = null; });
  return asking;
}

async function ask() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) return showState("gone", await problemOf(response));
    const { id: name, capabilities } = (await response.json()).data[0];
    offerPictures(capabilities.image_input.supported);
    const ready = await fetch("ready");
    showState(ready.ok ? "ready" : "", ready.ok ? name : `${name} is being loaded`);
    if (!ready.ok) setTimeout(askModel, 1000);
  } catch {
    showState("gone", "the server does not answer");
  }
}
