package fleettest

import (
	"context"
	"strconv"
	"testing"
	"time"

	"fleetd/internal/apiclient"
)

// Devices send ten notifications a second each, more than are kept. The online
// events of all of them stay readable, and the heap has a bound. By hand, with a
// figure each minute:
//
//	FLEETD_TEST_NOTIFY_DEVICES=1000 FLEETD_TEST_NOTIFY_SECONDS=300 go test -v -run TestManyNotifications ./internal/fleettest
func TestManyNotifications(t *testing.T) {
	t.Parallel()
	devices, seconds := setting(t, "FLEETD_TEST_NOTIFY_DEVICES", 80), setting(t, "FLEETD_TEST_NOTIFY_SECONDS", 6)
	limit := "1MiB" // some seconds' worth
	if devices > 100 {
		limit = "1GiB"
	}
	url, prefix, _, _ := natsServer(t)
	for _, kind := range []struct {
		name string
		args []string
	}{{"embedded", nil}, {"external", []string{"--nats", url, "--nats-prefix", prefix}}} {
		t.Run(kind.name, func(t *testing.T) {
			node := programs.Start(t, append(kind.args, "--notification-limit", limit, "--event-limit", "64MiB", "--photo-limit", "64MiB", "--log-level", "info")...)
			programs.Simulate(t, node.Info.OTA, "--devices", strconv.Itoa(devices), "--notify", "100ms", "--quiet")
			node.AwaitReady(t, devices)
			logged := time.Now()
			sent := func() float64 { return node.Metric(t, "fleetd_events_published_total", `kind="notifications"`) }
			node.Await(t, "the notifications are sent", 2*time.Duration(seconds)*time.Second, func() bool {
				done := sent() >= float64(10*devices*seconds)
				if done || time.Since(logged) >= time.Minute {
					logged = time.Now()
					t.Logf("%s: heap %.0f MB, %.0f notifications, %.0f events dropped", logged.Format(time.TimeOnly),
						node.Metric(t, "go_memstats_heap_inuse_bytes")/1e6, sent(), node.Metric(t, "fleetd_events_dropped_total"))
				}
				return done
			})
			if heap := node.Metric(t, "go_memstats_heap_inuse_bytes"); heap > 1e9 {
				t.Errorf("the heap has %.0f MB", heap/1e6)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			online := map[string]bool{}
			for event, err := range node.Events(ctx, apiclient.EventOptions{Type: "online", After: "1"}) { // all but one
				if err != nil {
					t.Fatal(err)
				}
				if online[string(event.Data)] = true; len(online) == devices-1 {
					break
				}
			}
			if len(online) < devices-1 {
				t.Errorf("%d of %d online events are left", len(online), devices-1)
			}
		})
	}
}
