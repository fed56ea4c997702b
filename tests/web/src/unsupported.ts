/**
 * What a board uses and this page does not render: it is shown and fails the test, so that nothing is passed over
 * silently.
 */
const found = new Set<string>();

export function unsupported(what: string): void {
  found.add(what);
}

export function allUnsupported(): string[] {
  return [...found].sort();
}
