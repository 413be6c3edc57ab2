package fleettest

import (
	"context"
	"encoding/json"
	"strings"
	"sync"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
)

// A trace shows the messages of a device that the same node holds, as on a node alone.
func TestTraceOnTheHolder(t *testing.T) {
	t.Parallel()
	n := programs.Start(t)
	const device = "02:f1:ee:00:00:00"
	programs.Simulate(t, n.Info.OTA, "--devices", "1", "--quiet")
	n.AwaitReady(t, 1)
	if _, err := n.StartTrace(t.Context(), device, api.NewTrace{}); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithTimeout(t.Context(), 30*time.Second)
	defer stop()
	var calling sync.WaitGroup
	defer calling.Wait()
	calling.Go(func() { // until the trace is read and shows one
		for ctx.Err() == nil {
			_, _ = n.Call(ctx, device, "self.get_device_status", apiclient.CallRequest{Timeout: time.Second})
		}
	})
	seen := map[string]bool{}
	for event, err := range n.TraceEvents(ctx, device, nil) {
		var e api.TraceEntry
		if err == nil {
			err = json.Unmarshal(event.Data, &e)
		}
		if err != nil {
			t.Fatal(err)
		}
		if seen[e.Kind] = true; seen["sent"] && seen["received"] && seen["call"] {
			stop()
			return
		}
	}
	t.Errorf("the trace shows %v", seen)
}

// A trace on one node shows the messages of a device that another holds.
func TestTraceAcrossNodes(t *testing.T) {
	t.Parallel()
	c := programs.StartCluster(t, ClusterOptions{Nodes: 2})
	const device = "02:f1:ee:00:00:00"
	programs.Simulate(t, c.OTA, "--devices", "1", "--transport", "websocket", "--quiet", "--reconnect", "200ms")
	c.AwaitReady(t, 1, time.Minute)
	reader := c.Nodes[0]
	if holder := reader.List(t)[0].Node; holder == "node-0" {
		reader = c.Nodes[1]
	}
	if _, err := reader.StartTrace(t.Context(), device, api.NewTrace{Payload: true}); err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var entries []api.TraceEntry
	ctx, stop := context.WithCancel(t.Context())
	var reading sync.WaitGroup
	defer reading.Wait()
	defer stop()
	reading.Go(func() {
		for event, err := range reader.TraceEvents(ctx, device, nil) {
			var e api.TraceEntry
			if err == nil {
				err = json.Unmarshal(event.Data, &e)
			}
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			entries = append(entries, e)
			mu.Unlock()
		}
	})
	shown := func(what func(api.TraceEntry) bool) bool {
		for _, e := range entries {
			if what(e) {
				return true
			}
		}
		return false
	}
	call := func(volume string) {
		_, _ = reader.Call(t.Context(), device, "self.audio_speaker.set_volume", apiclient.CallRequest{Arguments: json.RawMessage(`{"volume":` + volume + `}`), Timeout: time.Second})
	}
	reader.Await(t, "the messages of a call", 30*time.Second, func() bool {
		call("41")
		mu.Lock()
		defer mu.Unlock()
		return shown(func(e api.TraceEntry) bool {
			return e.Kind == "sent" && e.Method == "tools/call" && strings.Contains(e.Payload, "41")
		}) && shown(func(e api.TraceEntry) bool { return e.Kind == "received" && e.Type == "mcp" }) &&
			shown(func(e api.TraceEntry) bool { return e.Kind == "call" && e.Cause == "ok" })
	})
	mu.Lock()
	// security: N51
	if shown(func(e api.TraceEntry) bool {
		return strings.Contains(e.Payload, `"token":`) && !strings.Contains(e.Payload, `"token":"[redacted]"`)
	}) {
		t.Error("a payload has a token")
	}
	mu.Unlock()
	// The command ends by itself, and has printed what passed meanwhile.
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		out, errs, status := reader.Command(t, "trace", device, "--for", "2s")
		if status != 0 || !strings.Contains(out, "device <-  mcp tools/call") || !strings.Contains(out, "device ->  mcp") || strings.Contains(out, "arguments") {
			t.Errorf("status %d: %s%s", status, out, errs)
		}
	}()
	for {
		call("43")
		select {
		case <-ended:
			return
		case <-time.After(200 * time.Millisecond):
		}
	}
}
