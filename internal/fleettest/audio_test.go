package fleettest

import (
	"testing"
	"time"

	"fleetd/internal/devicetest"
	"fleetd/internal/store/storetest"
)

// Losing TCP in the middle of a conversation does not end it on the device:
// audio goes on in its channel, and the next connection finds it there. A new
// hello replaces it.
func TestAudioSurvivesTCPCut(t *testing.T) {
	t.Parallel()
	const id, frames = "02:00:00:00:08:01", 20
	node := programs.Start(t, natsFlag, natsAnyPort)
	received := attach(t, node).listen(t, id)
	proxy := storetest.NewProxy(t, node.Setting("--mqtt-listen"))
	proxy.Start()
	login := boot(t, node.Info.OTA, id)
	login.Endpoint = proxy.Address()
	d := login.dial(t, devicetest.NewScript())
	node.AwaitReady(t, 1)
	c := d.hello(t)
	talk := func(c *channel) { every(t, frameTime/3, frames, func(int) { c.say(t) }) }

	talk(c)
	proxy.Stop()
	<-d.Gone()
	node.Await(t, "the device is offline", 10*time.Second, func() bool {
		v, err := node.Device(t.Context(), id)
		return err == nil && v.State == "offline"
	})
	talk(c)
	proxy.Start()
	d = login.dial(t, devicetest.NewScript())
	node.AwaitReady(t, 1)
	talk(c)
	wantSeqs := func(session string, n int) {
		t.Helper()
		devicetest.Eventually(t, "all frames are received", func() bool { return len(received.of(session)) >= n })
		for i, seq := range received.of(session) {
			if seq != uint64(i+1) {
				t.Fatalf("frame %d of %s has the number %d", i+1, session, seq)
			}
		}
	}
	wantSeqs(c.Session, 3*frames)
	if v, err := node.Device(t.Context(), id); err != nil || !v.Audio.Open || v.Audio.Packets != 3*frames || v.Audio.Dropped != 0 {
		t.Errorf("audio %+v, %v", v.Audio, err)
	}

	talk(c)
	wantSeqs(c.Session, 4*frames) // a hello may overtake packets over UDP
	again := d.hello(t)
	if again.Session == c.Session || again.ssrc() == c.ssrc() {
		t.Errorf("the new hello got the old session %s or ssrc %s", again.Session, again.ssrc())
	}
	unknown := func() float64 { return node.Metric(t, "fleetd_udp_packets_total", `verdict="unknown_ssrc"`) }
	if unknown() != 0 {
		t.Errorf("%.0f packets were of an unknown channel", unknown())
	}
	talk(again)
	wantSeqs(again.Session, frames)
	talk(c) // of the old channel
	devicetest.Eventually(t, "the old channel is unknown", func() bool { return unknown() == frames })
	if len(received.of(c.Session)) != 4*frames || node.Metric(t, "fleetd_udp_channels") != 1 {
		t.Errorf("%d frames of the old channel, %.0f channels", len(received.of(c.Session)), node.Metric(t, "fleetd_udp_channels"))
	}
}
