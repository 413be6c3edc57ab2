// Command echo is a voice service in one file: it plays back the speech of every device. A real one puts speech recognition,
// a language model and a voice where this one keeps the packets; everything else is the same. See README.md.
package main

import (
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

const (
	frame = 60 * time.Millisecond // of sound in each packet
	quiet = 10                    // bytes of the longest packet that contains silence: devices keep sending while nobody speaks
	stale = 2 * time.Second       // without a packet, and the next one begins something new
)

// echo is the service; recording is the speech of one device.
type echo struct {
	nc            *nats.Conn
	prefix, token string
	pause, most   int // packets: of silence that end an utterance, and of the longest utterance
	mu            sync.Mutex
	devices       map[string]*recording
}

type recording struct {
	session        string
	packets        [][]byte
	spoken, manual bool      // there is speech among them; the device signals the end itself
	last, speaking time.Time // when the newest came; until when the device plays our answer
}

// audio takes one Opus packet. A device's packets come in order; the header Fleetd-Session names their conversation.
func (e *echo) audio(device string, h *recording, msg *nats.Msg) {
	now := time.Now()
	if now.Before(h.speaking) { // with echo cancellation devices hear while they speak
		return
	}
	if session := msg.Header.Get("Fleetd-Session"); session != h.session || now.Sub(h.last) > stale {
		h.session, h.packets, h.spoken = session, nil, false
	}
	h.packets, h.last = append(h.packets, msg.Data), now
	loud, recent := 0, h.packets[max(0, len(h.packets)-e.pause):]
	for _, packet := range recent {
		if len(packet) > quiet {
			loud++ // in silence one in seven still is
		}
	}
	h.spoken = h.spoken || loud > e.pause/2
	switch {
	case len(h.packets) >= e.most, h.spoken && !h.manual && loud <= e.pause/4:
		e.answer(device, h)
	case !h.spoken && !h.manual:
		h.packets = recent
	}
}

// listen takes a `listen` message: detect or start when the device begins to listen, stop when its button is released.
// Messages and packets travel apart: the last packets may arrive after a stop, and the wake word comes before its detect.
func (e *echo) listen(device string, h *recording, msg *nats.Msg) {
	var event struct{ Message struct{ State, Mode string } }
	_ = json.Unmarshal(msg.Data, &event) // a device may send anything
	switch event.Message.State {
	case "detect", "start":
		h.speaking, h.manual = time.Time{}, event.Message.Mode == "manual"
	case "stop":
		time.AfterFunc(100*time.Millisecond, func() { e.mu.Lock(); defer e.mu.Unlock(); e.answer(device, h) })
	}
}

// answer sends the recording back: tts start, the packets, tts stop. They reach the device in the order in which they
// are sent on one connection, and fleetd paces them to what the device can take, so they go in one burst (at most 30 s
// may wait). When the user interrupts, fleetd drops what waits and stops the device; a service that goes on producing
// sound subscribes to `messages.abort` and stops, too.
func (e *echo) answer(device string, h *recording) {
	packets := h.packets
	if h.packets, h.spoken = nil, false; len(packets) == 0 {
		return
	}
	h.speaking = time.Now().Add(time.Duration(len(packets)+10) * frame)
	message := func(verb, data string) *nats.Msg {
		return &nats.Msg{Subject: e.prefix + ".cmd." + device + "." + verb, Data: []byte(data), Header: nats.Header{"Fleetd-Token": {e.token}}}
	}
	go func() {
		reply, err := e.nc.RequestMsg(message("send", `{"type":"tts","state":"start"}`), 5*time.Second)
		if err == nil && string(reply.Data) != `{"ok":true}` {
			err = fmt.Errorf("refused: %s", reply.Data) // a problem object with code and detail, as in REST
		}
		for i := 0; i < len(packets) && err == nil; i++ {
			err = e.nc.PublishMsg(message("audio", string(packets[i])))
		}
		if err == nil {
			err = e.nc.PublishMsg(message("send", `{"type":"tts","state":"stop"}`))
		}
		log.Printf("%s sent %d packets; playing them back: %v", device, len(packets), err)
	}()
}

// subscribe hands what is published as <prefix>.devices.<device>.<what> to take, one message at a time.
func (e *echo) subscribe(what string, take func(device string, h *recording, msg *nats.Msg)) error {
	_, err := e.nc.Subscribe(e.prefix+".devices.*."+what, func(msg *nats.Msg) {
		device, _, _ := strings.Cut(strings.TrimPrefix(msg.Subject, e.prefix+".devices."), ".")
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.devices[device] == nil {
			e.devices[device] = &recording{}
		}
		take(device, e.devices[device], msg)
	})
	return err
}

func main() {
	url := flag.String("nats", "", "NATS URL of the fleet; default: that of the node running in --data-dir")
	prefix := flag.String("prefix", "fleetd.v1", "root of the fleet's subjects (--nats-prefix)")
	token := flag.String("token", os.Getenv("FLEETD_TOKEN"), "API token; default: $FLEETD_TOKEN, else the admin token in --data-dir")
	dir := flag.String("data-dir", "fleetd-data", "data directory of a node on this machine")
	silence := flag.Duration("silence", time.Second, "silence that ends an utterance, unless a button does")
	longest := flag.Duration("longest", 20*time.Second, "longest utterance")
	flag.Parse()
	var node struct{ NATS string }
	run, _ := os.ReadFile(filepath.Join(*dir, "run.json")) // a fleet elsewhere has neither here
	_ = json.Unmarshal(run, &node)
	admin, _ := os.ReadFile(filepath.Join(*dir, "admin-token"))
	*url, *token = cmp.Or(*url, node.NATS), cmp.Or(*token, strings.TrimSpace(string(admin)))
	if *url == "" {
		log.Fatalf("no NATS found in %s: start the node with `fleetd serve --nats-listen 127.0.0.1:4222`, or give --nats URL", *dir)
	}
	nc, err := nats.Connect(*url, nats.Name("echo"), nats.Token(*token), nats.MaxReconnects(-1))
	if err != nil {
		log.Fatalf("%s: %v", *url, err)
	}
	e := &echo{nc: nc, prefix: *prefix, token: *token, pause: int(*silence / frame), most: int(*longest / frame), devices: map[string]*recording{}}
	if err := cmp.Or(e.subscribe("messages.listen", e.listen), e.subscribe("audio", e.audio)); err != nil {
		log.Fatal(err)
	}
	log.Printf("listening to %s.devices.*.audio at %s", *prefix, nc.ConnectedUrlRedacted())
	select {} // until interrupted
}
