package fleettest

import (
	"io"
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
)

// photos is how many are listed.
func (n *Node) photos(t *testing.T) (count int) {
	t.Helper()
	for _, err := range apiclient.List[api.Photo](t.Context(), n.Client, nil, "photos") {
		if err != nil {
			t.Fatal(err)
		}
		count++
	}
	return count
}

// Lower limits of photos and events, by more than a GiB, keep what fits.
func TestLowerLimits(t *testing.T) {
	t.Parallel()
	node := programs.Start(t, "--photo-limit", "3GiB", "--event-limit", "3GiB")
	programs.Simulate(t, node.Info.OTA, "--transport", "mqtt", "--devices", "1", "--seed", "9", "--reconnect", "300ms")
	node.AwaitReady(t, 1)
	device := node.List(t)[0].ID
	for range 8 {
		askCamera(t, node, device, "what is there?")
	}
	if n := node.photos(t); n != 8 {
		t.Fatalf("%d photos", n)
	}
	node.Stop(t)
	for i := range node.args {
		if node.args[i] == "3GiB" {
			node.args[i] = "1MiB"
		}
	}
	node.Run(t)
	node.AwaitReady(t, 1)
	node.Await(t, "the node is ready", 20*time.Second, func() bool { return node.Client.Ready(t.Context()) == nil })
	answer := askCamera(t, node, device, "and now?")
	if _, err := node.Photo(t.Context(), answer.Photo, io.Discard); err != nil {
		t.Errorf("the new photo: %v", err)
	}
	if n := node.photos(t); n == 0 {
		t.Error("the new photo is not listed")
	}
	if n := node.Metric(t, "fleetd_events_dropped_total"); n != 0 {
		t.Errorf("%v events were dropped", n)
	}
}
