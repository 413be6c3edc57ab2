package firmware

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestRecordingIsSixtyMillisecondOpus(t *testing.T) {
	voice, err := openRecording(voiceFile)
	if err != nil {
		t.Fatal(err)
	}
	if got := time.Duration(len(voice.speech)) * frameDuration; got < 10*time.Second {
		t.Errorf("%s of speech", got)
	}
	seen := map[string]bool{}
	for i, packet := range append(voice.speech, voice.silence...) {
		// RFC 6716, section 3.1: configuration 11 is SILK wideband of 60 ms, mono, code 0 is one frame.
		if packet[0] != 11<<3 || len(packet) > 200 {
			t.Errorf("packet %d: %x", i, packet)
		}
		m := mark(nil, packet, 7, uint64(i))
		if len(packet) <= dtxFrame {
			if string(m) != packet {
				t.Errorf("silence %x became %x", packet, m)
			}
			continue
		}
		// Code 3, one frame, padding: the frame itself is unchanged (section 3.2.5).
		if m[0] != 11<<3|3 || m[1] != 0x41 || m[2] != markLength || string(m[3:len(m)-markLength]) != packet[1:] {
			t.Errorf("packet %d became %x", i, m)
		}
		if binary.BigEndian.Uint64(m[len(m)-8:]) != uint64(i) || seen[string(m)] {
			t.Errorf("packet %d is not its own", i)
		}
		seen[string(m)] = true
	}
	for _, bad := range []string{"", "\x00\x01", "\x00\x01\x00\x01\x00\x05abc", voiceFile[:len(voiceFile)-1]} {
		if _, err := openRecording(bad); err == nil {
			t.Errorf("%.10x is taken for a recording", bad)
		}
	}
}

func TestPlayout(t *testing.T) {
	var p playout
	now := time.Unix(1000, 0)
	played := []string{}
	play := func(opus []byte) { played = append(played, string(opus)) }
	push := func(name string) bool {
		p.begun(now, play)
		return p.push(now, []byte(name), frameDuration)
	}
	// One plays and forty wait; the next finds no room.
	for i := range playQueue + 1 {
		if !push(fmt.Sprint(i)) {
			t.Fatalf("packet %d dropped", i)
		}
	}
	if push("too many") {
		t.Error("packet 41 accepted")
	}
	now = now.Add(frameDuration)
	if !push("41") {
		t.Error("no room after 60 ms")
	}
	if got := strings.Join(played, " "); got != "0 1" {
		t.Errorf("played %s", got)
	}
	if left := p.left(now); left != 41*frameDuration {
		t.Errorf("left %s", left)
	}
	now = now.Add(10 * frameDuration)
	p.begun(now, play)
	if n := p.reset(); n != 30 || len(played) != 12 || p.left(now) != 0 {
		t.Errorf("reset %d, played %v, left %s", n, played, p.left(now))
	}
	// Behind a pause the next packet plays at once.
	now = now.Add(time.Hour)
	push("late")
	p.begun(now, play)
	if played[len(played)-1] != "late" {
		t.Errorf("played %v", played)
	}
}

func TestEchoCheck(t *testing.T) {
	const quiet = 99
	for _, tt := range []struct {
		name string
		sent string
		back string
		want string
	}{
		{"all", "abcd", "abcd", "4 0 0 0"},
		{"begins late", "abcd", "cd", "2 0 0 0"},
		{"one lost", "abcd", "abd", "3 1 0 0"},
		{"swapped", "abcd", "acbd", "3 1 1 0"},
		{"twice", "abcd", "aabcd", "4 0 1 0"},
		{"of somebody else", "abcd", "axb", "2 0 0 1"},
		{"silence between", "ab...cd", "ab..cd", "6 1 0 0"},
		{"silence first", "..ab", ".ab", "3 0 0 0"},
		{"silence too far", "ab12345678.", "ab.", "2 0 0 1"},
	} {
		var e echoCheck
		for range 2 {
			// The conversation before must not matter.
			e.begin()
			e.identical, e.lost, e.outOfOrder, e.foreign = 0, 0, 0, 0
			sum := func(c rune) uint64 {
				if c == '.' {
					return quiet
				}
				return uint64(c) + 1000
			}
			for _, c := range tt.sent {
				e.speak(sum(c))
			}
			for _, c := range tt.back {
				e.hear(sum(c), c == '.')
			}
			if got := fmt.Sprint(e.identical, e.lost, e.outOfOrder, e.foreign); got != tt.want {
				t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
			}
		}
	}
}

// speaking is a device in the speaking state with n packets in its queue, on a recorder.
func speaking(t *testing.T, profile string, n int) (*Device, *recorder) {
	d, r := vectorDevice(t)
	d.profile, d.mode, d.mqtt = named(t, profile), "auto", &mqttState{channel: &udpChannel{}}
	d.feed(`{"type":"tts","state":"start"}`)
	d.mu.Lock()
	for i := range n {
		d.takeAudioLocked(fmt.Append(nil, "packet ", i))
	}
	d.mu.Unlock()
	return d, r
}

func TestTTSStopPerGeneration(t *testing.T) {
	for _, tt := range []struct {
		profile string
		waits   bool
		cut     uint64
		blocks  bool
	}{
		{"fw-2.4", true, 0, false}, {"robot", true, 0, true}, {"fw-2.1", false, 9, false}, {"fw-1.9", false, 9, false},
	} {
		t.Run(tt.profile, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d, r := speaking(t, tt.profile, 10)
				d.feed(`{"type":"tts","state":"stop"}`)
				d.pump(true)
				d.feed(`{"type":"mcp","payload":{"jsonrpc":"2.0","method":"initialize","id":1}}`)
				d.pump(true)
				synctest.Wait()
				sent := strings.Join(r.take(), "")
				if got := strings.Contains(sent, `"start"`); got == tt.waits {
					t.Errorf("at once: %s", sent)
				}
				if got := !strings.Contains(sent, `"id":1`); got != tt.blocks {
					t.Errorf("at once: %s", sent)
				}
				time.Sleep(11 * frameDuration)
				synctest.Wait()
				sent = strings.Join(r.take(), "")
				if got := strings.Contains(sent, `"start"`); got != tt.waits {
					t.Errorf("later: %s", sent)
				}
				d.mu.Lock()
				d.app = appIdle
				d.hushLocked()
				d.mu.Unlock()
				a := d.Report().Audio
				if a.CutOff != tt.cut || a.Audible != 10-tt.cut {
					t.Errorf("cut off %d, audible %d", a.CutOff, a.Audible)
				}
			})
		})
	}
}

func TestTTSStartResetsTheQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, r := speaking(t, "fw-2.4", 10)
		// A second start while speaking changes nothing.
		d.feed(`{"type":"tts","state":"start"}`)
		if a := d.Report().Audio; a.ResetByStart != 0 {
			t.Errorf("reset %d", a.ResetByStart)
		}
		d.feed(`{"type":"tts","state":"stop"}`)
		d.feed(`{"type":"tts","state":"start"}`)
		time.Sleep(time.Second)
		synctest.Wait()
		a := d.Report().Audio
		if a.ResetByStart != 9 || a.Audible != 1 || d.appNow() != appSpeaking {
			t.Errorf("audio %+v, state %d", a, d.appNow())
		}
		if sent := r.take(); len(sent) != 0 {
			t.Errorf("sent %v", sent)
		}
		// The queue takes forty and one more that plays.
		d.mu.Lock()
		for i := range 50 {
			d.takeAudioLocked(fmt.Append(nil, "more ", i))
		}
		d.mu.Unlock()
		if a := d.Report().Audio; a.DroppedQueueFull != 9 {
			t.Errorf("dropped %d", a.DroppedQueueFull)
		}
	})
}

func TestTalkOverWebSocketComesBackIdentical(t *testing.T) {
	t.Parallel()
	s := newFakeServer(t)
	f := startFleet(t, s, "--talk", "--talk-for", "600ms", "--utterance", "10s", "--wake", "1h")
	c := s.acceptHello("a")
	var live [][]byte
	burst, stopped := 0, false
	for !stopped {
		opcode, data := c.read(t)
		switch {
		case opcode == opText:
			stopped = strings.Contains(data, `"stop"`)
		case burst < wakeBurst:
			burst++
		default:
			live = append(live, []byte(data))
		}
	}
	c.send(t, `{"type":"tts","state":"start"}`)
	eventually(t, f, "speaking", func(DeviceReport) bool { return f.devices[0].appNow() == appSpeaking })
	for _, opus := range live {
		c.frame(t, opBinary, opus)
	}
	r := eventually(t, f, "audible", func(r DeviceReport) bool { return r.Audio.Audible == uint64(len(live)) })
	sum := sha256.Sum256(bytes.Join(live, nil))
	a := r.Audio
	if a.AudibleSHA256 != hex.EncodeToString(sum[:]) || a.SpokenSHA256 != a.AudibleSHA256 || a.Spoken != uint64(len(live)) || a.EchoIdentical != a.Audible {
		t.Errorf("audio %+v", a)
	}
	if r.Transport != "websocket" || r.UDP != nil {
		t.Errorf("report %+v", r)
	}
	// The person leaves; the socket goes with the conversation, since a wake word will come again.
	c.send(t, `{"type":"tts","state":"stop"}`)
	if _, text, err := c.tryRead(); err == nil {
		t.Errorf("got %s", text)
	}
}
