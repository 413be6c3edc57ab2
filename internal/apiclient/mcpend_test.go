package apiclient

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

const slowCall = `{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"call_device_tool","arguments":{}}}` + "\n"

// A call is answered although the host has closed its end and the device takes its
// time: it runs, and the host may still read.
func TestAnswersAfterTheEndOfInput(t *testing.T) {
	t.Parallel()
	const takes = 6 * time.Second
	c := newServer(t, func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-time.After(takes):
			_, _ = io.WriteString(w, `{"jsonrpc":"2.0","id":1,"result":{}}`)
		case <-r.Context().Done():
		}
	})
	var out strings.Builder
	if err := c.BridgeMCP(t.Context(), MCPPath(""), strings.NewReader(slowCall), &out, nil); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), `"result"`) || strings.Count(out.String(), "\n") != 1 {
		t.Errorf("the host reads %q", out.String())
	}
}

// Where the bridge ends before, the host learns that the call may have had its
// effect.
func TestAnswersWhenTheBridgeEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	arrived := make(chan struct{}, 2)
	c := newServer(t, func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // or the server does not notice that the client leaves
		arrived <- struct{}{}
		<-r.Context().Done()
	})
	listen := `{"jsonrpc":"2.0","id":2,"method":"subscriptions/listen","params":{"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28"}}}` + "\n"
	var out strings.Builder
	ended := make(chan error, 1)
	go func() { ended <- c.BridgeMCP(ctx, MCPPath(""), strings.NewReader(slowCall+listen), &out, nil) }()
	<-arrived
	<-arrived
	cancel()
	<-ended
	if !strings.Contains(out.String(), `"id":1,"error"`) || !strings.Contains(out.String(), "may have") || strings.Contains(out.String(), `"id":2`) {
		t.Errorf("the host reads %q", out.String())
	}
}

// What only ends when the host leaves does not keep the bridge.
func TestListeningKeepsNobody(t *testing.T) {
	c := newServer(t, func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	})
	listen := `{"jsonrpc":"2.0","id":2,"method":"subscriptions/listen","params":{"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28"}}}` + "\n"
	var out strings.Builder
	ended := make(chan error, 1)
	go func() { ended <- c.BridgeMCP(t.Context(), MCPPath(""), strings.NewReader(listen), &out, nil) }()
	select {
	case err := <-ended:
		if err != nil || out.Len() > 0 {
			t.Errorf("%v %q", err, out.String())
		}
	case <-time.After(20 * time.Second):
		t.Error("the bridge waits for news")
	}
}
