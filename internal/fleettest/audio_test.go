package fleettest

import (
	"os"
	"strconv"
	"testing"
	"time"

	"fleetd/internal/devicetest"
	"fleetd/internal/store/storetest"
)

// setting is a number from the environment for full-size runs.
func setting(t testing.TB, name string, normal int) int {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return normal
	}
	n, err := strconv.Atoi(text)
	if err != nil || n <= 0 {
		t.Fatalf("%s=%q is not a number", name, text)
	}
	return n
}

// A forger who reads ssrc off the wire floods the port from before the first
// packet of the device on. The conversation goes on, both ways, and no packet
// goes to the forger.
func TestForgerCannotStealAudio(t *testing.T) {
	normal := 50_000
	if raceEnabled {
		normal = 5_000
	}
	rate := setting(t, "FLEETD_TEST_ATTACK_RATE", normal)
	const id, frames = "02:00:00:00:04:01", 60
	node := programs.Start(t, natsFlag, natsAnyPort)
	bus := attach(t, node)
	received := bus.listen(t, id)
	d := boot(t, node.Info.OTA, id).dial(t, devicetest.NewScript())
	c := d.hello(t)

	attack := func() (report chan UDPAttack) {
		report = make(chan UDPAttack, 1)
		before := node.Metric(t, "fleetd_udp_packets_total")
		go func() {
			report <- Attack[UDPAttack](t, programs, "--attack", "udp", "--target", c.Server.String(), "--ssrc", c.ssrc(),
				"--rate", strconv.Itoa(rate), "--duration", (frames*frameTime + 2*time.Second).String())
		}()
		node.Await(t, "the flood arrives", 10*time.Second, func() bool {
			return node.Metric(t, "fleetd_udp_packets_total") > before+float64(rate/10)
		})
		return report
	}
	answered := 0
	for round := range 2 { // before the first packet, and again
		report := attack()
		every(t, frameTime, frames, func(i int) {
			c.say(t)
			if i == frames/2 { // the device is known: audio can be sent to it
				bus.publish(t, id, "send", `{"type":"tts","state":"start"}`)
				for n := range 20 {
					bus.publish(t, id, "audio", string(frame(uint32(1000*(round+1)+n))))
				}
				bus.publish(t, id, "send", `{"type":"tts","state":"stop"}`)
			}
		})
		r := <-report
		t.Logf("round %d: %d forged packets at %.0f/s", round, r.Sent, float64(r.Sent)/r.Seconds)
		if r.PacketsBack != 0 || r.Sent < rate {
			t.Errorf("the forger sent %d packets and got %d", r.Sent, r.PacketsBack)
		}
		for len(c.Packets) > 0 {
			n, genuine := numberOf(<-c.Packets)
			if !genuine || n != uint32(1000*(round+1)+answered%20) {
				t.Errorf("the device received frame %d, %t, as its answer %d", n, genuine, answered)
			}
			answered++
		}
	}
	got, twice, noise := received.count()
	verdict := func(name string) float64 { return node.Metric(t, "fleetd_udp_packets_total", `verdict="`+name+`"`) }
	t.Logf("%d of %d frames received, %d twice, %d forged; accepted %.0f, held %.0f, implausible %.0f, foreign %.0f, jump %.0f, replayed %.0f, old %.0f",
		got, 2*frames, twice, noise, verdict("accepted"), verdict("held"), verdict("implausible"), verdict("foreign"), verdict("jump"), verdict("replayed"), verdict("old"))
	if got < 2*frames*99/100 || twice > 0 || noise > 1 {
		t.Errorf("%d of %d frames received, %d of them twice, and %d forged", got, 2*frames, twice, noise)
	}
	if answered < 39 || c.Dropped.Load() > 0 {
		t.Errorf("the device received %d of 40 frames and %d foreign packets", answered, c.Dropped.Load())
	}
	if refused := verdict("implausible") + verdict("foreign"); refused < float64(rate) || verdict("accepted") < frames {
		t.Errorf("metrics tell of %.0f refused and %.0f accepted packets", refused, verdict("accepted"))
	}
}

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
	wantSeqs(c.Session, 4*frames)
	if len(received.of(c.Session)) != 4*frames || node.Metric(t, "fleetd_udp_channels") != 1 {
		t.Errorf("%d frames of the old channel, %.0f channels", len(received.of(c.Session)), node.Metric(t, "fleetd_udp_channels"))
	}
}
