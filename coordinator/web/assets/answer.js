// An answer as it grows: each token in the dress of where it came from.
//
// Tokens are appended to the page directly: an answer may have thousands, and none of them changes.

export const ORIGINS = {
  accepted: { name: "drafted, accepted", words: "guessed ahead by the draft and confirmed by the target" },
  recovered: { name: "recovered", words: "the target's own choice where it differed from every guess" },
  bonus: { name: "bonus", words: "the target's own choice after a path that was accepted to its end" },
  plain: { name: "plain", words: "the target's own choice in a round without a guess" },
};

export class AnswerText {
  constructor(element) {
    this.element = element;
    this.number = 0;
  }

  clear(prompt) {
    this.number = 0;
    const echo = document.createElement("span");
    echo.className = "prompt";
    echo.textContent = prompt;
    this.element.replaceChildren(echo);
  }

  add(round, pieces) {
    const isAtEnd = this.element.scrollHeight - this.element.scrollTop - this.element.clientHeight < 30;
    const added = document.createDocumentFragment();
    for (const [token, text, origin] of pieces) {
      const span = document.createElement("span");
      span.className = `token ${origin}`;
      span.textContent = text;
      span.title = `token ${++this.number} (id ${token}): ${ORIGINS[origin].name}, told with round ${round}`;
      added.append(span);
    }
    this.element.append(added);
    if (isAtEnd) this.element.scrollTop = this.element.scrollHeight;
  }
}
