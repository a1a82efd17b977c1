// Finding and making elements.

export const find = (id) => document.getElementById(id);

export function make(name, className, parent) {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (parent) parent.append(element);
  return element;
}
