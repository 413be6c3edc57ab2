package fleet_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/speech"
	"fleetd/internal/devicetest"
	"fleetd/internal/envelope"
	"fleetd/internal/fleet"
	"fleetd/internal/hello"
)

// path records what reaches a device besides MCP, and when.
type path struct {
	mu     sync.Mutex
	log    []arrival
	closed int
	fails  bool
}

type arrival struct {
	at    time.Time
	text  string // of a message
	opus  []byte // of a packet
	stamp uint32
}

func (p *path) SendAudio(f envelope.Frame) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.fails {
		return errors.New("no address")
	}
	p.log = append(p.log, arrival{at: time.Now(), opus: bytes.Clone(f.Opus), stamp: f.Timestamp})
	return nil
}

func (p *path) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed++
}

func (p *path) closes() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.closed
}

func (p *path) note(msg []byte) {
	if m, err := envelope.Parse(msg); err == nil && string(m.Type) != envelope.TypeMCP {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.log = append(p.log, arrival{at: time.Now(), text: string(msg)})
	}
}

func (p *path) arrived() []arrival {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]arrival(nil), p.log...)
}

// packet is a 60 ms packet: three CELT frames of 20 ms.
func packet(n int) []byte { return fmt.Appendf([]byte{23<<3 | 3, 3}, "%06d", n) }

func send(t *testing.T, s *fleet.Service, body string) {
	t.Helper()
	if err := s.SendMessage(t.Context(), devices.Message{Principal: devicetest.Admin, Device: id, Body: []byte(body)}); err != nil {
		t.Fatalf("%s: %v", body, err)
	}
}

const (
	ttsStart = `{"type":"tts","state":"start"}`
	ttsStop  = `{"type":"tts","state":"stop"}`
)

// A burst of ten seconds is sent at the speed of playback: after the initial gap,
// never more than about a second ahead, complete, in order, with stop last.
func TestSpeechIsPaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := devicetest.New().Service(t, fleet.Config{})
		p := connect(t, s, "c1", devicetest.NewScript())
		synctest.Wait()
		begun := time.Now()
		const packets = 167
		send(t, s, ttsStart)
		for n := range packets {
			s.SendAudio(id, packet(n))
		}
		send(t, s, ttsStop)
		send(t, s, `{"type":"llm","emotion":"happy"}`)
		time.Sleep(12 * time.Second) // fake time
		log := p.path.arrived()
		if len(log) != packets+3 {
			t.Fatalf("%d packets and messages arrived, want %d", len(log), packets+3)
		}
		if !strings.Contains(log[0].text, `"start"`) && !strings.Contains(log[1].text, `"start"`) {
			t.Errorf("it begins with %s, %s", log[0].text, log[1].text)
		}
		playing, n := begun.Add(speech.SpeechGap), 0
		for i, a := range log {
			switch {
			case a.opus == nil && strings.Contains(a.text, `"llm"`):
				if i > 2 {
					t.Error("a message that does not belong to the speech waited for it")
				}
			case a.opus == nil:
			case !bytes.Equal(a.opus, packet(n)):
				t.Fatalf("packet %d is %q", n, a.opus)
			default:
				if ahead := playing.Sub(a.at); ahead > time.Second+60*time.Millisecond || a.at.Sub(begun) < speech.SpeechGap {
					t.Fatalf("packet %d was sent %v after the beginning, %v ahead", n, a.at.Sub(begun), ahead)
				}
				if a.stamp != uint32(60*n) {
					t.Errorf("packet %d has timestamp %d", n, a.stamp)
				}
				playing = playing.Add(60 * time.Millisecond)
				n++
			}
		}
		if last := log[len(log)-1]; !strings.Contains(last.text, `"stop"`) || last.at.Before(playing) {
			t.Errorf("the last one is %q, %v before the speech is over", last.text, playing.Sub(last.at))
		}
	})
}

// Audio beyond the limit is refused and counted.
func TestSpeechIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := devicetest.New().Service(t, fleet.Config{})
		connect(t, s, "c1", devicetest.NewScript())
		synctest.Wait()
		send(t, s, ttsStart)
		for n := range 600 { // 36 s
			s.SendAudio(id, packet(n))
		}
		// 30 s may wait, beside the packets sent since the first.
		if n := s.Stats().AudioDrops.Get(speech.AudioFull); n < 80 || n > 100 {
			t.Errorf("%d of 600 packets were refused", n)
		}
		s.SendAudio(id, nil)
		s.SendAudio(id, []byte{3<<3 | 1, 1, 2}) // 120 ms: longer than announced
		if n := s.Stats().AudioDrops.Get(speech.AudioRefused); n != 2 {
			t.Errorf("%d unplayable packets were refused, want 2", n)
		}
		s.SendAudio("02:00:00:00:00:99", packet(1))
		if n := s.Stats().AudioDrops.Get(speech.AudioNoChannel); n != 1 {
			t.Errorf("%d packets without a conversation", n)
		}
	})
}

// An interruption is answered at once, and nothing more of that speech is sent.
func TestAbortIsAnswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ports := devicetest.New()
		s := ports.Service(t, fleet.Config{})
		p := connect(t, s, "c1", devicetest.NewScript())
		synctest.Wait()
		send(t, s, ttsStart)
		for n := range 100 {
			s.SendAudio(id, packet(n))
		}
		time.Sleep(500 * time.Millisecond)
		if err := p.session.HandleControl([]byte(`{"session_id":"","type":"abort","reason":"wake_word_detected"}`)); err != nil {
			t.Fatal(err)
		}
		s.SendAudio(id, packet(100)) // the service has not received the abort yet
		send(t, s, ttsStop)
		synctest.Wait()
		before := p.path.arrived()
		if last := before[len(before)-1]; !strings.Contains(last.text, `"state":"stop"`) {
			t.Fatalf("the last one is %+v", last)
		}
		time.Sleep(10 * time.Second)
		if after := p.path.arrived(); len(after) != len(before) {
			t.Errorf("%d packets or messages followed the stop", len(after)-len(before))
		}
		if len(ports.Seen(devices.EventMessage)) != 1 {
			t.Error("the service did not receive the abort")
		}
		send(t, s, ttsStart) // the next speech is sent again
		s.SendAudio(id, packet(7))
		time.Sleep(time.Second)
		after := p.path.arrived()
		if !bytes.Equal(after[len(after)-1].opus, packet(7)) {
			t.Errorf("the next speech ends with %+v", after[len(after)-1])
		}
	})
}

// overMQTT is a device whose audio goes over UDP.
func overMQTT(t *testing.T, s *fleet.Service) *pipe {
	t.Helper()
	p := &pipe{script: devicetest.NewScript()}
	session, err := s.Accept(devices.Identity{Device: id, ClientID: "c1", Transport: devices.TransportMQTT}, p)
	if err != nil {
		t.Fatal(err)
	}
	p.session = session
	return p
}

func (p *pipe) hello(t *testing.T) (conversation *speech.Conversation, reply hello.Server) {
	t.Helper()
	reply, err := p.session.OpenAudio(hello.Device{}, hello.TransportUDP, func(c *speech.Conversation) (speech.AudioPath, error) {
		conversation = c
		return &p.path, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return conversation, reply
}

// A UDP conversation survives the loss of the control connection: the next session
// takes it over, a hello there replaces it, and a late goodbye for an earlier
// conversation is ignored.
func TestConversationOutlivesConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ports := devicetest.New()
		s := ports.Service(t, fleet.Config{})
		first := overMQTT(t, s)
		c, reply := first.hello(t)
		if reply.SessionID != first.session.ID()+"-1" {
			t.Errorf("conversation %s of session %s", reply.SessionID, first.session.ID())
		}
		c.HandleAudio(envelope.Frame{Opus: packet(1)})
		first.session.Close(devices.CloseGone)
		c.HandleAudio(envelope.Frame{Opus: packet(2)})
		s.SendAudio(id, packet(3))
		time.Sleep(40 * time.Second)
		second := overMQTT(t, s)
		time.Sleep(40 * time.Second)
		c.HandleAudio(envelope.Frame{Opus: packet(4)})
		if events := ports.Frames(); len(events) != 3 || events[2].Seq != 3 || events[2].Session != c.ID() {
			t.Errorf("events %+v", events)
		}
		if log := first.path.arrived(); len(log) != 1 || first.path.closes() != 0 {
			t.Errorf("%d packets reached the device, its path was closed %d times", len(log), first.path.closes())
		}
		v := state(t, s)
		if !v.AudioOpen || v.AudioPackets != 3 {
			t.Errorf("open %t, %d packets", v.AudioOpen, v.AudioPackets)
		}
		next, _ := second.hello(t)
		if first.path.closes() != 1 {
			t.Error("a new hello did not replace the conversation")
		}
		if err := second.session.HandleControl(fmt.Appendf(nil, `{"session_id":%q,"type":"goodbye"}`, c.ID())); err != nil {
			t.Fatal(err)
		}
		if second.path.closes() != 0 {
			t.Error("a late goodbye ended the new conversation")
		}
		if err := second.session.HandleControl(fmt.Appendf(nil, `{"session_id":%q,"type":"goodbye"}`, next.ID())); err != nil {
			t.Fatal(err)
		}
		if second.path.closes() != 1 || state(t, s).AudioOpen {
			t.Error("goodbye did not end the conversation")
		}
		if state(t, s).State != devices.StateOnline {
			t.Error("goodbye ended the session")
		}
	})
}

// A conversation whose device does not come back ends after a minute. A hangup sends
// the device a goodbye.
func TestConversationEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ports := devicetest.New()
		var output bytes.Buffer
		s := ports.ServiceOver(t, fleet.Config{}, func(p *fleet.Ports) { p.Log = slog.New(slog.NewTextHandler(&output, nil)) })
		lost := overMQTT(t, s)
		lost.hello(t)
		lost.session.Close(devices.CloseGone)
		time.Sleep(61 * time.Second)
		if lost.path.closes() != 1 || s.Stats().Conversations.Load() != 0 {
			t.Error("an abandoned conversation stays open")
		}
		back := overMQTT(t, s)
		c, _ := back.hello(t)
		c.Hangup()
		log := back.path.arrived()
		if len(log) != 1 || log[0].text != `{"type":"goodbye","session_id":"`+c.ID()+`"}` || back.path.closes() != 1 {
			t.Errorf("after a hangup: %+v", log)
		}
		c, _ = back.hello(t)
		c.ReportNoAudio(3)
		if n := s.Stats().SilentChannels.Load(); n != 1 || !strings.Contains(output.String(), "--public-udp") {
			t.Errorf("%d silent channels; the log, which must name the port: %s", n, output.String())
		}
		if e := ports.Seen(devices.EventSilent); len(e) != 1 || e[0].Device != id || string(e[0].Fields) != `"conversation":"`+c.ID()+`","packets":3` {
			t.Errorf("events of silence: %+v", e)
		}
		back.session.Close(devices.CloseDraining)
		if log := back.path.arrived(); len(log) != 2 || !strings.Contains(log[1].text, c.ID()) {
			t.Errorf("when the node stops: %+v", log)
		}
	})
}

func TestMessagesAreChecked(t *testing.T) {
	ports := devicetest.New()
	s := ports.Service(t, fleet.Config{})
	p := connect(t, s, "c1", devicetest.NewScript())
	for body, want := range map[string]devices.Code{
		`{"type":"mcp","payload":{}}`: devices.CodeForbidden, `{"type":"hello"}`: devices.CodeForbidden,
		`{"type":"tts"}`: devices.CodeBadRequest, `{"type":"tts","state":1}`: devices.CodeBadRequest, `[]`: devices.CodeBadRequest, ``: devices.CodeBadRequest,
		`{"type":"alert","status":"x","message":"y"}`:                                  devices.CodeBadRequest,
		`{"type":"custom","payload":"` + strings.Repeat("x", speech.MaxMessage) + `"}`: devices.CodeTooLarge,
	} {
		err := s.SendMessage(t.Context(), devices.Message{Principal: devicetest.Admin, Device: id, Body: json.RawMessage(body)})
		if devices.AsError(err).Code != want {
			t.Errorf("%.40s: %v, want %s", body, err, want)
		}
	}
	send(t, s, `{"type":"alert","status":"Bell","message":"It rings","emotion":"happy"}`)
	devicetest.Eventually(t, "the alert arrives", func() bool {
		log := p.path.arrived()
		return len(log) == 1 && log[0].text == `{"session_id":"`+p.session.ID()+`","type":"alert","status":"Bell","message":"It rings","emotion":"happy"}`
	})
	err := s.SendMessage(t.Context(), devices.Message{Principal: devicetest.Admin, Device: "02:00:00:00:00:99", Body: json.RawMessage(ttsStop)})
	if devices.AsError(err).Code != devices.CodeDeviceUnknown {
		t.Errorf("an unknown device: %v", err)
	}
}

// A hello on a superseded connection does not end the conversation of its successor.
func TestSupersededHelloKeepsTheConversation(t *testing.T) {
	s := devicetest.New().Service(t, fleet.Config{})
	first := overMQTT(t, s)
	second := overMQTT(t, s)
	c, _ := second.hello(t)
	_, err := first.session.OpenAudio(hello.Device{}, hello.TransportUDP, func(*speech.Conversation) (speech.AudioPath, error) { return &first.path, nil })
	if err == nil {
		t.Error("a session that has ended opened a conversation")
	}
	if first.path.closes() != 1 || second.path.closes() != 0 {
		t.Errorf("its path was closed %d times, the successor's %d", first.path.closes(), second.path.closes())
	}
	if c.SendAudio(envelope.Frame{Opus: packet(1)}) != nil || s.Stats().Conversations.Load() != 1 {
		t.Error("the successor's conversation has ended")
	}
}

// A late goodbye of a service does not end another conversation.
func TestForeignGoodbye(t *testing.T) {
	s := devicetest.New().Service(t, fleet.Config{})
	p := overMQTT(t, s)
	c, _ := p.hello(t)
	err := s.SendMessage(t.Context(), devices.Message{Principal: devicetest.Admin, Device: id, Body: []byte(`{"type":"goodbye","session_id":"older-1"}`)})
	if devices.AsError(err).Code != devices.CodeSuperseded || p.path.closes() != 0 {
		t.Errorf("%v, closed %d times", err, p.path.closes())
	}
	send(t, s, `{"type":"goodbye"}`)
	if log := p.path.arrived(); p.path.closes() != 1 || len(log) != 1 || !strings.Contains(log[0].text, c.ID()) {
		t.Errorf("closed %d times, the device received %+v", p.path.closes(), log)
	}
}

// Messages to a device without a conversation keep their order.
func TestMessagesKeepTheirOrder(t *testing.T) {
	s := devicetest.New().Service(t, fleet.Config{})
	p := overMQTT(t, s)
	const messages = 60
	answered := make(chan error, messages)
	for n := range messages {
		s.QueueMessage(devices.Message{Principal: devicetest.Admin, Device: id, Body: fmt.Appendf(nil, `{"session_id":"","type":"custom","payload":{"n":%d}}`, n)}, func(err error) { answered <- err })
	}
	for range messages {
		if err := <-answered; err != nil {
			t.Error(err)
		}
	}
	for n, a := range p.path.arrived() {
		if a.text != fmt.Sprintf(`{"session_id":"","type":"custom","payload":{"n":%d}}`, n) {
			t.Fatalf("message %d is %s", n, a.text)
		}
	}
	if n := len(p.path.arrived()); n != messages {
		t.Errorf("%d arrived", n)
	}
}

// The device ignores the case of member names, so it would read `Type` as the type.
func TestTypeInAnotherCase(t *testing.T) {
	s := devicetest.New().Service(t, fleet.Config{})
	overMQTT(t, s)
	for _, body := range []string{`{"Type":"mcp","type":"custom","payload":{}}`, `{"type\u0000":"mcp","type":"custom"}`, `{"type":"custom","TYPE":"mcp"}`} {
		if err := s.SendMessage(t.Context(), devices.Message{Principal: devicetest.Admin, Device: id, Body: []byte(body)}); devices.AsError(err).Code != devices.CodeBadRequest {
			t.Errorf("%s: %v", body, err)
		}
	}
}

// A device without power sends no goodbye: its conversation ends after minutes without
// traffic, not before.
func TestQuietConversationEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := devicetest.New().Service(t, fleet.Config{})
		p := overMQTT(t, s)
		c, _ := p.hello(t)
		for range 10 {
			time.Sleep(100 * time.Second) // fake time
			c.HandleAudio(envelope.Frame{Opus: packet(1)})
		}
		if p.path.closes() != 0 {
			t.Fatal("a conversation ended while the device sent audio")
		}
		time.Sleep(5 * time.Minute)
		if p.path.closes() != 1 || state(t, s).State != devices.StateOnline {
			t.Error("a conversation without traffic stays open")
		}
	})
}

// answer is one of a voice service, as the times between its parts.
type answer struct {
	name     string
	thinks   time.Duration   // from the end of the question to its text
	speeches []time.Duration // pauses before each speech of 3 s
	calls    time.Duration   // of the device, before the speeches
}

// answers have pauses as those of voice services. One that runs two models one after the other answers after 1 to 2 s; 7 s
// is a slow one with a cold model. Speeches of one answer follow each other at once, in any phase of the check each second.
func answers() []answer {
	all := []answer{
		{"at once", 0, []time.Duration{0}, 0},
		{"after a second", 400 * time.Millisecond, []time.Duration{time.Second}, 0},
		{"a slow service", 3 * time.Second, []time.Duration{7 * time.Second}, 0},
		{"a call of the device that takes 20 s", time.Second, []time.Duration{500 * time.Millisecond}, 20 * time.Second},
		{"a call of the device that takes 7.5 s", 0, []time.Duration{500 * time.Millisecond}, 7500 * time.Millisecond},
		{"none", time.Second, nil, 0},
	}
	for phase := range 10 {
		all = append(all, answer{fmt.Sprint("two speeches, phase ", phase), time.Duration(phase) * 100 * time.Millisecond, []time.Duration{0, 300 * time.Millisecond}, 0})
	}
	return all
}

// After push-to-talk a device that loses its wake word in an open channel gets a goodbye: soon, since the wake word is dead
// once it was lost, but no answer is cut off. Other versions keep their channel.
func TestPushToTalkOverUDP(t *testing.T) {
	const slack = time.Second
	for _, version := range []string{"2.2.1", "2.2.2", "2.3.0", "2.4.0"} {
		for _, a := range answers() {
			t.Run(version+" "+a.name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := devicetest.New().Service(t, fleet.Config{})
					script := devicetest.NewScript()
					script.Firmware = version
					script.Call = func(string, json.RawMessage) string { time.Sleep(a.calls); return devicetest.True }
					p := connectUDP(t, s, script)
					for _, msg := range []string{`{"session_id":"s","type":"listen","state":"start","mode":"manual"}`, `{"session_id":"s","type":"listen","state":"stop"}`} {
						if err := p.session.HandleControl([]byte(msg)); err != nil {
							t.Fatal(err)
						}
					}
					time.Sleep(a.thinks)
					send(t, s, `{"type":"stt","text":"what time is it"}`)
					if a.calls > 0 {
						if _, err := call(t, s, "self.audio_speaker.set_volume", `{"volume":9}`); err != nil {
							t.Error(err)
						}
					}
					const packets = 50 // 3 s
					for _, pause := range a.speeches {
						time.Sleep(pause)
						send(t, s, ttsStart)
						for n := range packets {
							s.SendAudio(id, packet(n))
						}
						send(t, s, ttsStop)
						time.Sleep(speech.SpeechGap + packets*60*time.Millisecond + slack/5) // it is played
					}
					end := time.Now()
					if stopped := p.path.last("stop"); !stopped.IsZero() {
						end = stopped
					}
					time.Sleep(time.Minute)
					goodbye, audio := p.path.last("goodbye"), 0
					for _, x := range p.path.arrived() {
						if x.opus != nil {
							audio++
						}
					}
					if audio != packets*len(a.speeches) {
						t.Errorf("%d packets of the answer arrived, of %d", audio, packets*len(a.speeches))
					}
					limit := speech.IdleAfterAnswer + slack
					if len(a.speeches) == 0 {
						limit = speech.IdleAfterStop + slack
					}
					switch ends := version == "2.2.2" || version == "2.3.0"; {
					case !ends && !goodbye.IsZero():
						t.Errorf("this version gets a goodbye %v after the answer", goodbye.Sub(end))
					case ends && (goodbye.IsZero() || goodbye.Sub(end) > limit || p.path.closes() != 1):
						t.Errorf("goodbye %v after the answer, want at most %v; closed %d times", goodbye.Sub(end), limit, p.path.closes())
					}
					if v := state(t, s); v.State != devices.StateOnline {
						t.Errorf("the device is %s", v.State)
					}
					s.Close()
				})
			})
		}
	}
}

// connectUDP connects a device by MQTT that has opened a conversation, and whose tools are read.
func connectUDP(t *testing.T, s *fleet.Service, script *devicetest.Script) *pipe {
	t.Helper()
	p := &pipe{script: script}
	session, err := s.Accept(devices.Identity{Device: id, ClientID: "c1", Transport: devices.TransportMQTT}, p)
	if err != nil {
		t.Fatal(err)
	}
	p.session = session
	session.StartMCP(devices.FeaturesMCP)
	ready(t, s)
	if _, err := session.OpenAudio(hello.Device{}, hello.TransportUDP, func(*speech.Conversation) (speech.AudioPath, error) { return &p.path, nil }); err != nil {
		t.Fatal(err)
	}
	return p
}

// last returns when the last message with this word arrived; zero: none did.
func (p *path) last(word string) (at time.Time) {
	for _, a := range p.arrived() {
		if strings.Contains(a.text, `"`+word+`"`) {
			at = a.at
		}
	}
	return at
}

// The conversation of a WebSocket is open from the hello on, and created when something needs it.
func TestSocketConversationIsCreatedWhenNeeded(t *testing.T) {
	s := devicetest.New().Service(t, fleet.Config{})
	for n, use := range map[string]func(*pipe){
		"nothing":            nil,
		"audio":              func(p *pipe) { p.session.HandleAudio(envelope.Frame{Opus: packet(1)}) },
		"audio for it":       func(*pipe) { s.SendAudio(id, packet(1)) },
		"a message":          func(p *pipe) { _ = p.session.HandleControl([]byte(`{"type":"listen","state":"start"}`)) },
		"a message for it":   func(*pipe) { send(t, s, ttsStart) },
		"all at once, often": nil,
	} {
		opened, rounds := 0, 1
		if strings.HasSuffix(n, "often") {
			rounds = 200
		}
		for range rounds {
			p := &pipe{script: devicetest.NewScript()}
			session, err := s.Accept(devices.Identity{Device: id, ClientID: "c1", Transport: devices.TransportWebSocket}, p)
			if err != nil {
				t.Fatal(err)
			}
			p.session, opened = session, 0
			if _, err := session.OpenAudio(hello.Device{}, hello.TransportWebSocket, func(*speech.Conversation) (speech.AudioPath, error) {
				opened++
				return &p.path, nil
			}); err != nil {
				t.Fatal(err)
			}
			if v := state(t, s); !v.AudioOpen || !session.IsTalking() || opened != 0 || s.Stats().Conversations.Load() != 1 {
				t.Fatalf("%s: open %t, %d created, %d counted", n, v.AudioOpen, opened, s.Stats().Conversations.Load())
			}
			want := 0
			if use != nil {
				use(p)
				want = 1
			}
			if v := state(t, s); rounds == 1 && (!v.AudioOpen || opened != want || s.Stats().Conversations.Load() != 1) {
				t.Errorf("%s: open %t, %d created, %d counted", n, v.AudioOpen, opened, s.Stats().Conversations.Load())
			}
			var all sync.WaitGroup
			if rounds > 1 {
				all.Go(func() { session.HandleAudio(envelope.Frame{Opus: packet(1)}) })
				all.Go(func() { s.SendAudio(id, packet(1)) })
			}
			session.Close(devices.CloseGone)
			all.Wait()
			if opened > 1 || p.path.closes() != opened || session.IsTalking() || s.Stats().Conversations.Load() != 0 {
				t.Fatalf("%s: after the end %d created, %d closed, %d counted", n, opened, p.path.closes(), s.Stats().Conversations.Load())
			}
		}
	}
}
