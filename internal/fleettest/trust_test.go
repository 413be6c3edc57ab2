package fleettest

import (
	"testing"
	"time"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
)

// A device that waits is approved on a node it never spoke to and comes in
// within its own polling; a revoked one is out within a second, whichever node
// holds it and whichever is approver.
func TestApprovedAndRevokedAcrossNodes(t *testing.T) {
	t.Parallel()
	const (
		// Firmware polls every 3 s whether it was activated, then checks anew and
		// connects (application.cc:457-492). The simulator's time is scaled.
		polling = 900 * time.Millisecond
		dialing = 5 * time.Second // with two cores under the race detector
	)
	c := programs.StartCluster(t, ClusterOptions{Args: []string{"--admission", "approve"}})
	ids := map[string]string{"mqtt": "02:f1:ee:00:01:00", "websocket": "02:f1:ee:00:02:00"}
	for transport, id := range ids {
		programs.Simulate(t, c.OTA+map[string]string{"mqtt": "mqtt/", "websocket": "ws/"}[transport], "--devices", "1", "--mac-base", id, "--profile", "fw-2.4", "--wake", "500ms", "--reconnect", "500ms", "--time-scale", "0.3")
		c.Nodes[0].Await(t, transport+" waits", 20*time.Second, func() bool {
			d, err := c.Nodes[0].Device(t.Context(), id)
			return err == nil && d.State == "pending"
		})
	}
	n := 0
	for transport, id := range ids {
		approver := c.Nodes[n%len(c.Nodes)]
		if out, errs, status := approver.Command(t, "devices", "approve", id); status != 0 {
			t.Fatalf("%s: %s %s", transport, out, errs)
		}
		approved := time.Now()
		approver.Await(t, transport+" is in", 20*time.Second, func() bool {
			d, err := approver.Device(t.Context(), id)
			return err == nil && d.State == "online" && d.MCP.State == "ready"
		})
		if took := time.Since(approved); took > polling+dialing {
			t.Errorf("%s came in %v after it was approved", transport, took)
		} else {
			t.Logf("%s came in %v after it was approved", transport, took)
		}
		n++
	}
	for transport, id := range ids {
		d, err := c.Nodes[0].Device(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		var holder, other *Node
		for _, node := range c.Nodes {
			if node.Info.Node == d.Node {
				holder = node
			} else {
				other = node
			}
		}
		held := holder.Metric(t, "fleetd_devices")
		if _, errs, status := other.Command(t, "devices", "revoke", id); status != 0 {
			t.Fatalf("%s: %s", transport, errs)
		}
		revoked := time.Now()
		holder.Await(t, transport+" is out", 20*time.Second, func() bool { return holder.Metric(t, "fleetd_devices") < held })
		// security: D2
		if took := time.Since(revoked); took > time.Second {
			t.Errorf("%s, held by %s and revoked on %s, was cut after %v", transport, d.Node, other.Info.Node, took)
		}
		if _, errs, status := other.Command(t, "call", id, volume, "volume=1"); status != 2 {
			t.Errorf("%s: a call of a revoked device ends with %d: %s", transport, status, errs)
		}
	}
	c.Nodes[0].Await(t, "both came again and were refused", 20*time.Second, func() bool {
		mqtt, websocket := 0.0, 0.0
		for _, node := range c.Nodes {
			mqtt += node.Metric(t, "fleetd_mqtt_connects_total", `code="4"`) + node.Metric(t, "fleetd_mqtt_connects_total", `code="5"`)
			websocket += node.Metric(t, "fleetd_device_refusals_total", `status="401"`)
		}
		return mqtt > 0 && websocket > 0
	})
	for _, node := range c.Nodes {
		// security: D2
		if held := node.Metric(t, "fleetd_devices"); held != 0 {
			t.Errorf("%v revoked devices are back on %s", held, node.Info.Node)
		}
	}
}

// What an operator was told is done outlives the node, however soon that dies.
func TestDecisionsOutliveAKill(t *testing.T) {
	t.Parallel()
	node := programs.Start(t)
	programs.Simulate(t, node.Info.OTA, "--devices", "3", "--mac-base", "02:f1:ee:00:03:00")
	node.AwaitReady(t, 3)
	for i, d := range node.List(t) {
		var err error
		switch i {
		case 0:
			_, err = node.Revoke(t.Context(), d.ID)
		case 1:
			name := "kept"
			_, err = node.Patch(t.Context(), d.ID, api.DeviceEdit{Name: &name}, 0)
		case 2:
			_, err = apiclient.Send[api.Device](t.Context(), node.Client, apiclient.Request{Method: "POST", Path: []string{"devices", d.ID, "rotate"}, Body: api.Grace{Grace: "1h"}})
		}
		if err != nil {
			t.Fatal(err)
		}
		node.Kill(t)
		node.Run(t)
		switch again, err := node.Device(t.Context(), d.ID); {
		case err != nil:
			t.Fatal(err)
		case i == 0 && again.Admission != "revoked", i == 1 && again.Name != "kept", i == 2 && again.Credentials.Generation == d.Credentials.Generation:
			t.Errorf("after the kill: %+v", again)
		}
	}
}
