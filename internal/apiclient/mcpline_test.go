package apiclient

import (
	"bufio"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
)

// A line that is too long is one lost message, and not the end of the host.
func TestReadLine(t *testing.T) {
	r := bufio.NewReader(strings.NewReader("one\n" + strings.Repeat("x", maxMCPLine+1) + "\ntwo\nthree"))
	for _, want := range []struct {
		line  string
		whole bool
		end   bool
	}{{"one\n", true, false}, {"", false, false}, {"two\n", true, false}, {"three", true, true}} {
		line, whole, err := readLine(r)
		if whole != want.whole || errors.Is(err, io.EOF) != want.end || whole && string(line) != want.line || len(line) > maxMCPLine {
			t.Errorf("%d bytes, whole %t, %v; want %q", len(line), whole, err, want.line)
		}
	}
}

// A request has one answer, also if the connection breaks off after it.
func TestOneAnswer(t *testing.T) {
	c := newServer(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: {\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{}}\n\n")
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})
	var out strings.Builder
	if err := c.BridgeMCP(t.Context(), MCPPath(""), strings.NewReader(`{"jsonrpc":"2.0","id":1,"method":"ping"}`), &out, nil); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(out.String(), "\n"); n != 1 || !strings.Contains(out.String(), "result") {
		t.Errorf("%d answers: %s", n, out.String())
	}
}
