package firmware

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"testing"
)

func TestTalkStreamsAndHearsAudio(t *testing.T) {
	s := newFakeServer(t)
	plain := s.ota
	s.ota = func(n int, body []byte) (int, string) {
		status, text := plain(n, body)
		return status, strings.Replace(text, `"version":1`, `"version":3`, 1)
	}
	f := startFleet(t, s, "--talk")
	c := s.acceptHello("a")
	up := sha256.New()
	var texts []string
	for n := 0; n < wakeBurst+3; {
		opcode, data := c.read(t)
		if opcode == opText {
			texts = append(texts, data)
			continue
		}
		opus, _, err := unpackAudio(3, []byte(data))
		if err != nil {
			t.Fatal(err)
		}
		up.Write(opus)
		n++
	}
	want := `{"session_id":"a","type":"listen","state":"detect","text":"你好小智"}{"session_id":"a","type":"listen","state":"start","mode":"auto"}`
	if got := strings.Join(texts, ""); got != want {
		t.Errorf("messages %s\nwant %s", got, want)
	}
	c.send(t, `{"type":"tts","state":"start"}`)
	eventually(t, f, "speaking", func(DeviceReport) bool {
		f.devices[0].mu.Lock()
		defer f.devices[0].mu.Unlock()
		return f.devices[0].app == appSpeaking
	})
	c.frame(t, opBinary, packAudio(nil, 3, 0, []byte("opus-1")))
	c.send(t, `{"type":"tts","state":"stop"}`)
	for {
		opcode, data := c.read(t)
		if opcode == opText {
			if !strings.Contains(data, `"state":"start","mode":"auto"`) {
				t.Errorf("after tts stop: %s", data)
			}
			break
		}
		opus, _, _ := unpackAudio(3, []byte(data))
		up.Write(opus)
	}
	r := f.devices[0].Report()
	down := sha256.Sum256([]byte("opus-1"))
	if r.Audio.FramesReceived != 1 || r.Audio.FramesPlayed != 1 || r.Audio.ReceivedSHA256 != hex.EncodeToString(down[:]) {
		t.Errorf("audio %+v", r.Audio)
	}
	// A frame without the header of version 3 makes the device read foreign memory.
	c.frame(t, opBinary, []byte{0})
	eventually(t, f, "crashed", inState(StateCrashed))
}

func TestNotifications(t *testing.T) {
	s := newFakeServer(t)
	f := startFleet(t, s, "--notify", "20ms")
	c := s.acceptHello("a")
	for n := 1; n <= 2; n++ {
		_, text := c.read(t)
		want := fmt.Sprintf(`{"session_id":"a","type":"mcp","payload":{"jsonrpc":"2.0","method":"notifications/button_pressed","params":{"count":%d}}}`, n)
		if text != want {
			t.Errorf("got %s\nwant %s", text, want)
		}
	}
	if r := f.devices[0].Report(); r.Notifications < 2 {
		t.Errorf("notifications %d", r.Notifications)
	}
}

func TestFaults(t *testing.T) {
	list := `{"withUserTools":true}`
	run := func(name string, check func(t *testing.T, s *fakeServer, f *Fleet), args ...string) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newFakeServer(t)
			check(t, s, startFleet(t, s, append([]string{"--fault", name, "--slow", "50ms", "--late", "100ms"}, args...)...))
		})
	}
	run("silent", func(t *testing.T, s *fakeServer, _ *Fleet) {
		c := s.acceptHello("a")
		c.request(t, 1, "initialize", "")
		c.request(t, 2, "tools/list", "")
		c.frame(t, opPing, []byte("x"))
		if opcode, text := c.read(t); opcode != opPong {
			t.Errorf("answered %s", text)
		}
	})
	run("slow", func(t *testing.T, s *fakeServer, _ *Fleet) {
		c := s.acceptHello("a")
		c.request(t, 1, "initialize", "")
		c.frame(t, opPing, []byte("x"))
		if opcode, _ := c.read(t); opcode != opPong {
			t.Error("initialize answered before the ping")
		}
		if _, text := c.read(t); !strings.Contains(text, `"id":1,"result"`) {
			t.Errorf("answered %s", text)
		}
	})
	run("late-reply", func(t *testing.T, s *fakeServer, _ *Fleet) {
		c := s.acceptHello("a")
		c.request(t, 1, "tools/call", `{"name":"self.get_device_status"}`)
		if r, _ := c.call(t, 2, "tools/list", ""); r.Payload.ID != 2 {
			t.Errorf("first answer has id %d", r.Payload.ID)
		}
		if _, text := c.read(t); !strings.Contains(text, `"id":1,"result"`) {
			t.Errorf("late answer %s", text)
		}
	})
	run("unescaped-error", func(t *testing.T, s *fakeServer, _ *Fleet) {
		c := s.acceptHello("a")
		c.request(t, 1, "tools/call", `{"name":"self.get_device_status"}`)
		if _, text := c.read(t); json.Valid([]byte(text)) || !strings.Contains(text, `"id":1,"error":{"message":"`) {
			t.Errorf("answered %s", text)
		}
	})
	run("cursor-loop", func(t *testing.T, s *fakeServer, _ *Fleet) {
		c := s.acceptHello("a")
		cursors := map[string]int{}
		cursor := ""
		for id := 1; id <= 12; id++ {
			r, _ := c.call(t, id, "tools/list", `{"cursor":"`+cursor+`"}`)
			var page struct {
				NextCursor string `json:"nextCursor"`
			}
			if err := json.Unmarshal(r.Payload.Result, &page); err != nil || page.NextCursor == "" {
				t.Fatalf("list ends at page %d: %s", id, r.Payload.Result)
			}
			cursor = page.NextCursor
			cursors[cursor]++
		}
		if len(cursors) == 12 {
			t.Error("no cursor came twice")
		}
	})
	run("oversize-tool", func(t *testing.T, s *fakeServer, f *Fleet) {
		c := s.acceptHello("a")
		r, _ := c.call(t, 1, "tools/list", list)
		var page struct {
			NextCursor string `json:"nextCursor"`
		}
		if err := json.Unmarshal(r.Payload.Result, &page); err != nil || page.NextCursor != "self.test.oversize" {
			t.Fatalf("first page points to %q, %v", page.NextCursor, err)
		}
		r, _ = c.call(t, 2, "tools/list", `{"cursor":"self.test.oversize","withUserTools":true}`)
		if r.Payload.Error == nil || r.Payload.Error.Message != "Failed to add tool self.test.oversize because of payload size limit" {
			t.Errorf("second page %+v", r.Payload)
		}
		r, _ = c.call(t, 3, "tools/call", `{"name":"self.get_system_info"}`)
		if r.Payload.Error != nil {
			t.Errorf("a tool after it cannot be called: %+v", r.Payload.Error)
		}
	})
	run("dup-hello", func(t *testing.T, s *fakeServer, _ *Fleet) {
		c := s.acceptHello("a")
		if _, text := c.read(t); !strings.Contains(text, `"type":"hello"`) {
			t.Errorf("second message %s", text)
		}
	})
	run("clone", func(t *testing.T, s *fakeServer, _ *Fleet) {
		a, b := s.accept(), s.accept()
		if a.header.Get("Device-Id") != b.header.Get("Device-Id") || a.header.Get("Client-Id") == b.header.Get("Client-Id") {
			t.Errorf("headers %v and %v", a.header, b.header)
		}
	})
	run("flap", func(t *testing.T, s *fakeServer, f *Fleet) {
		c := s.acceptHello("a")
		if _, _, err := c.tryRead(); err != io.EOF {
			t.Errorf("first connection ends with %v", err)
		}
		s.acceptHello("b")
	})
	run("bad-frame", func(t *testing.T, s *fakeServer, f *Fleet) {
		c := s.accept()
		if opcode, data := c.read(t); opcode != opBinary || data == "" {
			t.Errorf("first frame: opcode %d", opcode)
		}
		c.read(t)
		c.send(t, `{"type":"hello","transport":"websocket","session_id":"a"}`)
		invalid := 0
		for range 8 {
			if opcode, data := c.read(t); opcode == opText && !json.Valid([]byte(data)) {
				invalid++
			}
		}
		if invalid < 2 {
			t.Errorf("%d invalid texts", invalid)
		}
		if r, _ := c.call(t, 1, "initialize", ""); r.Payload.ID != 1 {
			t.Errorf("afterwards %+v", r)
		}
	})
}

func TestRobotSendsForeignReplies(t *testing.T) {
	s := newFakeServer(t)
	startFleet(t, s, "--profile", "robot")
	c := s.acceptHello("a")
	foreign := 0
	for id := 1; id <= 16; id++ {
		c.request(t, id, "tools/call", `{"name":"self.light.get_power"}`)
	}
	for range 18 {
		_, text := c.read(t)
		if strings.Contains(text, fmt.Sprint(`"id":`, foreignID+foreign+1)) {
			foreign++
		}
	}
	if foreign != 2 {
		t.Errorf("%d foreign replies among 18, want 2", foreign)
	}
}

func TestTooLongReplyEndsTheSession(t *testing.T) {
	s := newFakeServer(t)
	f := startFleet(t, s, "--profile", "robot", "--wake", "50ms")
	c := s.acceptHello("a")
	c.request(t, 1, "tools/call", `{"name":"self.test.large","arguments":{"bytes":66000}}`)
	// Nothing comes; the next wake opens a new socket.
	s.acceptHello("b")
	if r := f.devices[0].Report(); r.SendErrors != 1 {
		t.Errorf("send errors %d", r.SendErrors)
	}
	if _, _, err := c.tryRead(); err == nil {
		t.Error("a reply of 66,000 bytes was sent")
	}
}

func TestOldFirmwareHidesNothing(t *testing.T) {
	s := newFakeServer(t)
	startFleet(t, s, "--profile", "fw-1.9")
	c := s.acceptHello("a")
	r, _ := c.call(t, 1, "tools/call", `{"name":"self.camera.take_photo","arguments":{"question":"?"}}`)
	if !strings.Contains(string(r.Payload.Result), `{\"success\": false, \"message\": \"Image explain URL or token is not set\"}`) {
		t.Errorf("camera failure %s", r.Payload.Result)
	}
	r, _ = c.call(t, 2, "tools/call", `{"name":"self.reboot"}`)
	if r.Payload.Error == nil {
		t.Errorf("v1.9.4 has no self.reboot: %+v", r)
	}
}
