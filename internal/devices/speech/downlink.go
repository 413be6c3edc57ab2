package speech

import (
	"bytes"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/envelope"
	"fleetd/internal/jsonspan"
	"fleetd/internal/opus"
	"fleetd/internal/tasks"
)

// Limits of the device (application.cc:518-522, 951-960, audio_service.h:42): it plays nothing
// before `tts start` has taken effect, and keeps at most 40 packets; further packets are
// lost without a report.
const (
	// MaxSpeech is how much audio is queued for one device.
	MaxSpeech = 30 * time.Second
	// SpeechAhead is how far sending is ahead of playback.
	SpeechAhead = time.Second
	// SpeechGap is the pause between `tts start` and the first packet.
	SpeechGap = 150 * time.Millisecond
	// speechTail is the pause between the end of playback and `tts stop`, at which firmware
	// up to v2.1.0 drops the packets it still has.
	speechTail = 100 * time.Millisecond
	// maxAhead limits the packets that are sent ahead, whatever their duration.
	maxAhead = 30
	// longestPacket is the packet duration in the server hello.
	longestPacket = 60 * time.Millisecond
	// MaxSpeechBytes is how many bytes are queued for one device, including messages.
	MaxSpeechBytes = 512 << 10
)

// downlink is the queue to one device, in order, sent at the speed of playback. Its
// conversation's lock protects it. Nothing runs while the queue is empty: pump is a task that
// ends when it has to wait, and a timer starts it again.
type downlink struct {
	items   []queuedItem
	next    int           // index of the first unsent item
	audio   time.Duration // playing time of the queued audio
	bytes   int           // of items and urgent
	urgent  [][]byte      // messages that are not part of the speech
	pumping bool
	timer   *time.Timer

	notBefore time.Time // earliest time of the next packet
	playedOut time.Time // when the device will have played what was sent
	started   time.Time // start of this speech, for its timestamps
	ahead     []time.Time

	messages uint64 // for the device, outside of speeches
	answered bool   // a speech has ended since the device stopped to listen, and no other began
}

// isPlaying reports whether something is queued, or the device plays what was sent.
func (d *downlink) isPlaying(now time.Time) bool {
	return d.next < len(d.items) || len(d.urgent) > 0 || d.playedOut.After(now)
}

// queuedItem is a packet, or a message of the speech.
type queuedItem struct {
	data     []byte
	duration time.Duration // of a packet; 0 for a message
	stamp    uint32        // of a packet, if the sender set one
	state    ttsState
}

type ttsState uint8

const (
	ttsOther ttsState = iota
	ttsStart
	ttsStop
)

func (d *downlink) clear() {
	if d.timer != nil {
		d.timer.Stop()
	}
	*d = downlink{pumping: d.pumping, urgent: d.urgent, messages: d.messages, answered: d.answered}
	for _, msg := range d.urgent {
		d.bytes += len(msg)
	}
}

// downLocked returns the queue, and creates it if necessary.
func (c *Conversation) downLocked() *downlink {
	if c.down == nil {
		c.down = &downlink{}
	}
	return c.down
}

// SendAudio queues a copy of one Opus packet for the device. Its timestamp is the sender's, in
// milliseconds, for server-AEC builds that echo it; 0 is replaced by the position in the
// speech. It never blocks. With an error the packet was dropped and counted.
func (c *Conversation) SendAudio(f envelope.Frame) error {
	packet := f.Opus
	duration, _, ok := opus.Inspect(packet)
	if !ok || duration > longestPacket {
		c.drop(AudioRefused)
		return devices.Errorf(devices.CodeBadRequest, "not an Opus packet of at most %v: the device could not decode it", longestPacket)
	}
	packet = c.padded(packet)
	c.mu.Lock()
	defer c.mu.Unlock()
	d := c.downLocked()
	switch {
	case c.ended:
		c.drop(AudioNoChannel)
		return devices.Errorf(devices.CodeConnectionLost, "the conversation has ended")
	case c.interrupted:
		c.drop(AudioAborted)
		return nil // the sender does not know of the interruption yet
	case d.audio+duration > MaxSpeech || d.bytes+len(packet) > MaxSpeechBytes:
		c.drop(AudioFull)
		return devices.Errorf(devices.CodeDeviceBusy, "%v of audio are queued for the device already; send more slowly", MaxSpeech)
	}
	d.audio += duration
	c.enqueueLocked(queuedItem{data: bytes.Clone(packet), duration: duration, stamp: f.Timestamp})
	return nil
}

// SendMessage queues one message. Those of the speech (`tts`) keep their order with the
// audio, others are sent first. The caller has checked msg.
func (c *Conversation) SendMessage(kind string, msg []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	d := c.downLocked()
	if c.ended {
		return devices.Errorf(devices.CodeConnectionLost, "the conversation has ended")
	}
	if d.bytes+len(msg) > MaxSpeechBytes {
		return devices.Errorf(devices.CodeDeviceBusy, "%d bytes are queued for the device already; try again later", d.bytes)
	}
	if kind != "tts" {
		if c.owned { // otherwise each message would prolong a UDP conversation that the device has left
			c.other.Add(1)
		}
		d.messages++
		d.urgent = append(d.urgent, bytes.Clone(msg))
		d.bytes += len(msg)
		c.wakeLocked()
		return nil
	}
	item := queuedItem{data: bytes.Clone(msg), state: ttsStateOf(msg)}
	if item.state == ttsStart {
		c.interrupted = false
	}
	if !c.interrupted {
		c.enqueueLocked(item)
	}
	return nil
}

func ttsStateOf(msg []byte) ttsState {
	switch state, _ := jsonspan.String(jsonspan.Member(msg, "state")); state {
	case "start":
		return ttsStart
	case "stop":
		return ttsStop
	}
	return ttsOther
}

func (c *Conversation) enqueueLocked(item queuedItem) {
	d := c.down
	if d.next > 0 && d.next >= len(d.items)/2 { // a speech without pauses must not grow without limit
		d.items, d.next = append(d.items[:0], d.items[d.next:]...), 0
	}
	d.items = append(d.items, item)
	d.bytes += len(item.data)
	c.wakeLocked()
}

// wakeLocked starts the pump unless it is running, or a timer is set that the new item does
// not change.
func (c *Conversation) wakeLocked() {
	d := c.down
	if d.pumping || d.timer != nil && len(d.urgent) == 0 {
		return
	}
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
	d.pumping = c.svc.opt.Tasks.Run(c.pump)
}

// abort handles the user's interruption: it drops the queue, and sends the device, which
// continues to play until then (application.cc:736-737), the end of the speech.
func (c *Conversation) abort() {
	c.mu.Lock()
	if c.ended {
		c.mu.Unlock()
		return
	}
	d := c.downLocked()
	for _, item := range d.items[d.next:] {
		if item.duration > 0 {
			c.drop(AudioAborted)
		}
	}
	d.clear()
	answered := c.interrupted
	c.interrupted = true
	c.mu.Unlock()
	if !answered { // else the stop was sent already, and nothing since
		c.stopSpeech()
	}
}

// stopSpeech sends `tts stop` before everything else.
func (c *Conversation) stopSpeech() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return
	}
	msg := jsonspan.AppendString([]byte(`{"type":"tts","state":"stop","session_id":`), c.id)
	d := c.downLocked()
	d.answered = true
	d.urgent = append(d.urgent, append(msg, '}'))
	d.bytes += len(msg) + 1
	c.wakeLocked()
}

// pump sends the items that are due, then ends or sets a timer for the rest.
func (c *Conversation) pump() {
	defer tasks.Contain(c.svc.opt.Log, c.End)
	for {
		c.mu.Lock()
		d := c.down
		if c.ended {
			d.pumping = false
			c.mu.Unlock()
			return
		}
		if len(d.urgent) > 0 {
			msg := d.urgent[0]
			d.urgent = d.urgent[1:]
			d.bytes -= len(msg)
			c.mu.Unlock()
			c.sendControl(msg)
			continue
		}
		if d.next == len(d.items) {
			d.items, d.next, d.urgent, d.pumping = nil, 0, nil, false
			c.mu.Unlock()
			return
		}
		item := &d.items[d.next]
		if wait := d.wait(item, time.Now()); wait > 0 {
			d.timer = time.AfterFunc(wait, c.onTimer)
			d.pumping = false
			c.mu.Unlock()
			return
		}
		taken := *item
		item.data = nil
		d.next++
		c.other.Add(1)
		d.bytes -= len(taken.data)
		d.audio -= taken.duration
		stamp := d.markSent(&taken, time.Now())
		c.mu.Unlock()
		if taken.duration == 0 {
			c.sendControl(taken.data)
		} else if err := c.path.SendAudio(envelope.Frame{Timestamp: stamp, Opus: taken.data}); err != nil {
			c.drop(AudioUnsent)
		} else {
			c.svc.stats.AudioSent.Add(1)
		}
	}
}

// onTimer starts the pump when the next item is due.
func (c *Conversation) onTimer() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.down.timer = nil
	if !c.ended && !c.down.pumping {
		c.down.pumping = c.svc.opt.Tasks.Run(c.pump)
	}
}

// wait returns how long the item has to wait.
func (d *downlink) wait(item *queuedItem, now time.Time) time.Duration {
	switch {
	case item.state == ttsStop:
		return d.playedOut.Add(speechTail).Sub(now)
	case item.duration == 0:
		return 0
	}
	wait := max(d.notBefore.Sub(now), d.playedOut.Add(-SpeechAhead).Sub(now))
	for len(d.ahead) > 0 && !d.ahead[0].After(now) {
		d.ahead = d.ahead[1:]
	}
	if len(d.ahead) >= maxAhead {
		wait = max(wait, d.ahead[len(d.ahead)-maxAhead].Sub(now))
	}
	return wait
}

// markSent updates the end of playback for a sent item, and returns the item's timestamp in
// the speech, in milliseconds.
func (d *downlink) markSent(item *queuedItem, now time.Time) uint32 {
	switch {
	case item.state == ttsStart:
		d.answered = false
		d.notBefore = now.Add(SpeechGap)
		if d.playedOut.Before(d.notBefore) {
			d.playedOut = d.notBefore
		}
		d.started = d.playedOut
	case item.state == ttsStop:
		d.playedOut, d.ahead, d.answered = now, nil, true
	case item.duration > 0:
		if d.playedOut.Before(now) {
			d.playedOut = now
		}
		if d.started.IsZero() {
			d.started = now
		}
		stamp := item.stamp
		if stamp == 0 {
			stamp = uint32(d.playedOut.Sub(d.started).Milliseconds())
		}
		d.playedOut = d.playedOut.Add(item.duration)
		d.ahead = append(d.ahead, d.playedOut)
		return stamp
	}
	return 0
}

// sendControl writes a message to the device's current connection.
func (c *Conversation) sendControl(msg []byte) {
	if err := c.line.SendControl(msg); err != nil {
		c.svc.stats.MessageDrops.Add(1)
	}
}
