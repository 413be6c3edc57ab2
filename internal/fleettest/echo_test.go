package fleettest

import (
	"fmt"
	"testing"
	"time"
)

// wantEchoes wants every device to have received exactly what it sent, wake word
// included.
func wantEchoes(t *testing.T, r Report) {
	t.Helper()
	for _, d := range r.Devices {
		a := d.Audio
		if a.Spoken == 0 || a.Audible != a.FramesSent || a.EchoIdentical != a.FramesSent || a.SentSHA256 != a.AudibleSHA256 ||
			a.EchoLost+a.EchoOutOfOrder+a.EchoForeign+a.DroppedQueueFull+a.DroppedNotSpeaking+a.CutOff+a.ResetByStart != 0 {
			t.Errorf("%s (%s over %s): %s; audio %+v", d.ID, d.Profile, d.Transport, d.Error, a)
		}
	}
}

// What a device sends comes back to it whole, in order and bit for bit, over
// either transport, though the service sends it in one burst.
func TestEchoIsFrameIdentical(t *testing.T) {
	t.Parallel()
	const several = 6
	node := programs.Start(t, natsFlag, natsAnyPort)
	programs.Echo(t, node)
	talk := func(transport, mac, seconds string, devices int, profile string) *Simulation {
		return programs.Simulate(t, node.Info.OTA, "--transport", transport, "--mac-base", mac, "--devices", fmt.Sprint(devices), "--profile", profile,
			"--talk", "--wake", "10m", "--utterance", seconds, "--talk-for", seconds, "--ramp", "5/s")
	}
	sims := map[string]*Simulation{ // 4 s are more than the 40 packets that the firmware queues
		"one over MQTT":          talk("mqtt", "02:ec:00:00:01:00", "4s", 1, "fw-2.4"),
		"one over WebSocket":     talk("websocket", "02:ec:00:00:02:00", "4s", 1, "fw-2.4"),
		"several over MQTT":      talk("mqtt", "02:ec:00:00:03:00", "2s", several, "fw-2.4"), // older ones take no frames of one byte over UDP
		"several over WebSocket": talk("websocket", "02:ec:00:00:04:00", "2s", several, "fw-2.4,robot"),
	}
	const all = 2 + 2*several
	node.Await(t, "all conversations have begun", 20*time.Second, func() bool { return node.Metric(t, "fleetd_hello_seconds_count") >= all })
	node.Await(t, "all conversations are over", 60*time.Second, func() bool { return node.Metric(t, "fleetd_conversations") == 0 })
	for name, sim := range sims {
		r := sim.Report(t)
		t.Logf("%s: %+v", name, r.Totals.AudioCounts)
		wantEchoes(t, r)
	}
	if n := node.Metric(t, "fleetd_audio_dropped_total", `reason="full"`) + node.Metric(t, "fleetd_audio_dropped_total", `reason="unsent"`) +
		node.Metric(t, "fleetd_audio_dropped_total", `reason="not_published"`); n != 0 {
		t.Errorf("%.0f packets were dropped", n)
	}
}
