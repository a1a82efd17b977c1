// Pictures of a message: chosen or pasted, made smaller, sent as data URLs, shown.

import { find, make } from "./elements.js";

const LONGEST_SIDE = 1536; // pixels: models read no more
let chosen = []; // { name, url }

// The text of a message's content, which may have pictures beside it.
export function textOf(content) {
  if (!Array.isArray(content)) return content || "";
  return content.filter((part) => part.type === "text").map((part) => part.text).join("\n");
}

export function drawPictures(place, content) {
  for (const part of Array.isArray(content) ? content : []) {
    if (part.type !== "image_url") continue;
    const picture = make("img", "picture", place);
    picture.src = part.image_url.url;
    picture.alt = "Picture in the message";
  }
}

// Shows the button for pictures where the model takes some.
export function offerPictures(isTaken) {
  find("attach").hidden = !isTaken;
  if (!isTaken) takePictures();
}

export function hasPictures() {
  return chosen.length > 0;
}

// Returns the parts of the chosen pictures; none are chosen any more.
export function takePictures() {
  const parts = chosen.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  chosen = [];
  drawChosen();
  return parts;
}

export async function choosePictures(files) {
  find("picture-problem").textContent = "";
  if (find("attach").hidden) return;
  for (const file of files) {
    try {
      chosen.push({ name: file.name, url: await asDataUrl(file) });
    } catch {
      find("picture-problem").textContent = `${file.name} is no picture that this browser opens`;
    }
  }
  drawChosen();
}

async function asDataUrl(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, LONGEST_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const drawing = canvas.getContext("2d");
  drawing.fillStyle = "white"; // behind what is transparent: JPEG is not
  drawing.fillRect(0, 0, canvas.width, canvas.height);
  drawing.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

function drawChosen() {
  const list = find("pictures");
  list.replaceChildren();
  list.hidden = chosen.length === 0;
  chosen.forEach((picture, number) => {
    const item = make("li", "", list);
    const shown = make("img", "", item);
    shown.src = picture.url;
    shown.alt = picture.name;
    const remove = make("button", "quiet", item);
    remove.type = "button";
    remove.textContent = "Remove";
    remove.setAttribute("aria-label", `Remove ${picture.name}`);
    remove.addEventListener("click", () => {
      chosen.splice(number, 1);
      drawChosen();
      find("prompt").focus();
    });
  });
}
