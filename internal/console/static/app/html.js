// Preact and htm, bound together once.
import { h } from "../vendor/preact.js";
import htm from "../vendor/htm.js";

export { Component, Fragment, render } from "../vendor/preact.js";
export { useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState } from "../vendor/hooks.js";
export const html = htm.bind(h);
