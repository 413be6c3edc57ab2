package devicetest

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/speech"
	"fleetd/internal/opus"
)

// Behaviours that only one transport has.
const (
	PushToTalk           = "an idle channel ends after push-to-talk if the wake word would be lost in it"
	GoodbyeAfterNodeLoss = "the device receives one goodbye for a conversation of a lost node"
	ShortPackets         = "short packets are padded if they would be dropped"
)

// old is a device of that firmware version, which it reports in `initialize`.
func (f Frontend) old(t testing.TB, version string) (Device, *Script) {
	t.Helper()
	script := NewScript()
	script.Firmware = version
	d := f.withOpenAudio(t, script)
	Eventually(t, "the firmware is known", func() bool {
		v, err := f.Service.Get(t.Context(), testID)
		return err == nil && v.Device.Firmware == version
	})
	return d, script
}

func (f Frontend) isOnline(t testing.TB) bool {
	v, err := f.Service.Get(t.Context(), testID)
	return err == nil && v.State == devices.StateOnline
}

// pushToTalk releases the button, is answered, and is idle. Up to then, and for
// other versions, the connection stays.
func pushToTalk(t *testing.T, f Frontend) {
	const slack = 2 * time.Second
	for version, ends := range map[string]bool{"2.3.0": true, "2.4.0": false} {
		synctest.Test(t, func(t *testing.T) {
			f := f.InMemory(t)
			d, _ := f.old(t, version)
			send := func(text string) {
				t.Helper()
				if err := d.Send(text); err != nil {
					t.Fatal(err)
				}
			}
			send(`{"session_id":"s","type":"listen","state":"start","mode":"manual"}`)
			send(`{"session_id":"s","type":"listen","state":"stop"}`)
			f.tell(t, `{"type":"stt","text":"what time is it"}`)
			time.Sleep(speech.IdleAfterStop / 2) // the answer takes its time
			f.tell(t, `{"type":"tts","state":"start"}`)
			f.tell(t, `{"type":"tts","state":"stop"}`)
			time.Sleep(speech.IdleAfterStop - slack)
			if synctest.Wait(); !f.isOnline(t) {
				t.Errorf("%s: ended within %v after the answer", version, speech.IdleAfterStop-slack)
			}
			time.Sleep(2 * slack)
			if synctest.Wait(); f.isOnline(t) == ends {
				t.Errorf("%s: online %t, %v after the answer", version, !ends, speech.IdleAfterStop+slack)
			}
		})
	}
}

func goodbyeToTheDead(t *testing.T, f Frontend) {
	script := NewScript()
	d := f.Online(t, testID, "c1", script)
	goodbyes := func() (n int) {
		for _, text := range script.Messages() {
			if strings.Contains(text, `"goodbye"`) {
				n++
			}
		}
		return n
	}
	f.tell(t, `{"type":"goodbye"}`) // ends the conversation of this connection
	Eventually(t, "the conversation is over", func() bool {
		v, err := f.Service.Get(t.Context(), testID)
		return err == nil && !v.AudioOpen && goodbyes() == 1
	})
	own := script.Received()[0].SessionID
	for _, id := range []string{own + "-1", "", own, strings.Repeat("x", 200), "dead-1", "dead-1", "dead-2"} {
		if err := d.Send(`{"session_id":"` + id + `","type":"mcp","payload":{"jsonrpc":"2.0","id":1,"result":{}}}`); err != nil {
			t.Fatal(err)
		}
	}
	Eventually(t, "the goodbye for the lost conversation is sent", func() bool { return goodbyes() == 2 })
	f.tell(t, `{"type":"noop"}`) // comes after anything else
	Eventually(t, "the device has all", func() bool {
		all := script.Messages()
		return strings.Contains(all[len(all)-1], "noop")
	})
	if all := script.Messages(); goodbyes() != 2 || !strings.Contains(strings.Join(all, "\n"), `{"type":"goodbye","session_id":"dead-1"}`) {
		t.Errorf("the device receives %q", all)
	}
}

func shortPackets(t *testing.T, f Frontend) {
	short := [][]byte{{23 << 3}, {23<<3 | 1, 5, 6}, {23<<3 | 2, 1, 7, 8, 9}, {23<<3 | 3, 3, 1, 2, 3}, {23<<3 | 3, 0x41, 1, 5, 0}}
	d, _ := f.old(t, "2.3.0")
	f.tell(t, `{"type":"tts","state":"start"}`)
	for _, packet := range short {
		f.Service.SendAudio(testID, packet)
	}
	for i, packet := range short {
		got, err := d.ReceiveAudio()
		if err != nil {
			t.Fatal(err)
		}
		want, _, _ := opus.Inspect(packet)
		if duration, _, ok := opus.Inspect(got); len(got) < 8 || !ok || duration != want {
			t.Errorf("packet %d arrives as %x, %v", i, got, duration)
		}
	}
}
