package fleettest

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
)

// receiver takes deliveries of webhooks.
type receiver struct {
	url   string
	fails atomic.Bool
	times atomic.Int64 // of deliveries that were taken

	mu  sync.Mutex
	got map[string]string // the event by the id of its delivery
}

func newReceiver(t testing.TB) *receiver {
	r := &receiver{got: map[string]string{}}
	server := httptest.NewServer(r)
	t.Cleanup(server.Close)
	r.url = server.URL
	return r
}

func (r *receiver) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	var body struct {
		Data json.RawMessage `json:"data"`
	}
	if err := json.NewDecoder(req.Body).Decode(&body); err != nil || r.fails.Load() {
		w.WriteHeader(http.StatusInternalServerError)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.times.Add(1)
	r.got[req.Header.Get("webhook-id")] = compact(body.Data)
}

func compact(data []byte) string {
	var b bytes.Buffer
	if json.Compact(&b, data) != nil {
		return string(data)
	}
	return b.String()
}

// Everything reaches a receiver that failed for a while, once by its id, though the nodes that delivered were killed
// meanwhile. Another receiver, which never answers, delays nothing.
func TestWebhooksAndKills(t *testing.T) {
	long(t)
	t.Parallel()
	const kills = 4
	c := programs.StartCluster(t, ClusterOptions{Seed: 29, Args: []string{"--webhook-allow", "127.0.0.1"}})
	good := newReceiver(t)
	silent := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-r.Context().Done():
		case <-t.Context().Done():
		}
	}))
	t.Cleanup(silent.Close)
	for i, url := range []string{silent.URL, good.url} {
		if _, err := c.Nodes[i].CreateWebhook(t.Context(), api.NewWebhook{URL: url, Types: []string{"online", "offline"}}); err != nil {
			t.Fatal(err)
		}
	}
	started := time.Now()
	good.fails.Store(true)
	sim := programs.Simulate(t, c.OTA, "--transport", "mqtt", "--devices", "20", "--mac-base", "02:b5:00:00:00:00", "--fault", "flap", "--time-scale", "0.2", "--reconnect", "300ms")
	for range kills {
		time.Sleep(3 * time.Second) // devices come and go between two kills
		var delivers *Node
		c.Nodes[0].Await(t, "a node delivers", time.Minute, func() bool {
			for _, n := range c.Nodes {
				if n.Metric(t, "fleetd_webhooks_failing") > 0 {
					delivers = n
					return true
				}
			}
			return false
		})
		delivers.Kill(t)
		delivers.Run(t)
	}
	good.fails.Store(false)
	sim.Report(t)

	var mu sync.Mutex
	want := map[string]bool{}
	ctx, stop := context.WithCancel(t.Context())
	var reading sync.WaitGroup
	reading.Go(func() {
		for e, err := range c.Nodes[0].Events(ctx, apiclient.EventOptions{Since: started.Add(-time.Second)}) {
			if err != nil {
				t.Error(err)
				return
			}
			if e.Type == "online" || e.Type == "offline" {
				mu.Lock()
				want[compact(e.Data)] = true
				mu.Unlock()
			}
		}
	})
	defer reading.Wait()
	defer stop()
	time.Sleep(2 * time.Second) // the last events are there
	left := func() (missing []string) {
		mu.Lock()
		defer mu.Unlock()
		good.mu.Lock()
		defer good.mu.Unlock()
		found := map[string]bool{}
		for _, event := range good.got {
			found[event] = true
		}
		for event := range want {
			if !found[event] {
				missing = append(missing, event)
			}
		}
		return missing
	}
	for deadline := time.Now().Add(2 * time.Minute); len(left()) > 0; time.Sleep(200 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d events were not delivered, such as %s", len(left()), left()[0])
		}
	}
	mu.Lock()
	defer mu.Unlock()
	good.mu.Lock()
	defer good.mu.Unlock()
	ids := map[string]string{}
	for id, event := range good.got {
		if !want[event] {
			t.Errorf("a delivery that is not an event of the fleet, %s: %s", id, event)
		}
		if other := ids[event]; other != "" {
			t.Errorf("one event with two ids, %s and %s: %s", other, id, event)
		}
		ids[event] = id
	}
	if len(want) < 50 {
		t.Errorf("only %d events", len(want))
	}
	t.Logf("%d events in %d deliveries, with %d kills", len(want), good.times.Load(), kills)
}
