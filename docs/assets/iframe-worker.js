// Browsers give no workers to pages that are opened from a folder. There, an empty frame runs the worker of the search.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(script) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<!doctype html>";
      this.inside = new Promise((ready) => {
        frame.onload = () => {
          const { contentWindow: inside, contentDocument: page } = frame;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const element = page.createElement("script");
          element.src = script;
          element.onload = () => ready(inside);
          page.body.append(element);
        };
      });
      document.body.append(frame);
    }
    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
  window.Worker = window.IFrameWorker;
}
