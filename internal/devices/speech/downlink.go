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

// What the device can take (application.cc:518-522, 951-960, audio_service.h:42):
// it plays nothing before `tts start` has taken effect, and keeps at most 40
// packets; what comes beyond them is lost without a word.
const (
	// MaxSpeech bounds the audio that waits for one device.
	MaxSpeech = 30 * time.Second
	// SpeechAhead is how far sending runs ahead of playing.
	SpeechAhead = time.Second
	// SpeechGap passes between `tts start` and the first packet.
	SpeechGap = 150 * time.Millisecond
	// speechTail passes between the end of playing and `tts stop`, up to which
	// firmware to v2.1.0 would throw away what it still holds.
	speechTail = 100 * time.Millisecond
	// maxAhead bounds the packets on their way, whatever their duration.
	maxAhead = 30
	// longestPacket is what the server hello announces.
	longestPacket = 60 * time.Millisecond
	// MaxSpeechBytes bounds what waits for one device, messages included.
	MaxSpeechBytes = 512 << 10
)

// downlink is what waits to be said to one device, in order, at the speed at
// which the device plays it. It is guarded by its conversation's lock. Nothing
// runs while nothing waits: pump is a task that ends when it has to wait and is
// started again by a timer.
type downlink struct {
	items   []said
	next    int           // index of the first item not sent
	audio   time.Duration // playing time of the audio in items
	bytes   int           // of items and urgent
	urgent  [][]byte      // messages that do not belong to the speech
	pumping bool
	timer   *time.Timer

	notBefore time.Time // of the next packet
	playedOut time.Time // when the device will have played what was sent
	started   time.Time // of this speech, origin of its timestamps
	ahead     []time.Time
}

// said is one thing to say: a packet, or a message of the speech.
type said struct {
	data     []byte
	duration time.Duration // of a packet; 0 for a message
	stamp    uint32        // of a packet, if its sender gave one
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
	*d = downlink{pumping: d.pumping, urgent: d.urgent}
	for _, msg := range d.urgent {
		d.bytes += len(msg)
	}
}

// downLocked makes the queue when there is something to say.
func (c *Conversation) downLocked() *downlink {
	if c.down == nil {
		c.down = &downlink{}
	}
	return c.down
}

// SendAudio queues one Opus packet for the device; it is copied. Its timestamp
// is the sender's, in milliseconds, for server-AEC builds that echo it; 0 is the
// packet's place in the speech. It never blocks. An error means that the packet
// was dropped and counted.
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
	case c.muted:
		c.drop(AudioAborted)
		return nil // the speaker cannot know yet that nobody listens
	case d.audio+duration > MaxSpeech || d.bytes+len(packet) > MaxSpeechBytes:
		c.drop(AudioFull)
		return devices.Errorf(devices.CodeDeviceBusy, "%v of audio wait for the device already", MaxSpeech)
	}
	d.audio += duration
	c.enqueueLocked(said{data: bytes.Clone(packet), duration: duration, stamp: f.Timestamp})
	return nil
}

// SendMessage queues one message. Those of the speech (`tts`) keep their place in
// it, others go ahead. The caller has checked msg.
func (c *Conversation) SendMessage(kind string, msg []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	d := c.downLocked()
	if c.ended {
		return devices.Errorf(devices.CodeConnectionLost, "the conversation has ended")
	}
	if d.bytes+len(msg) > MaxSpeechBytes {
		return devices.Errorf(devices.CodeDeviceBusy, "%d bytes wait for the device already", d.bytes)
	}
	if kind != "tts" {
		if c.owned { // else a conversation over UDP that nobody hears would go on with each
			c.other.Add(1)
		}
		d.urgent = append(d.urgent, bytes.Clone(msg))
		d.bytes += len(msg)
		c.wakeLocked()
		return nil
	}
	item := said{data: bytes.Clone(msg), state: ttsStateOf(msg)}
	if item.state == ttsStart {
		c.muted = false
	}
	if !c.muted {
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

func (c *Conversation) enqueueLocked(item said) {
	d := c.down
	if d.next > 0 && d.next >= len(d.items)/2 { // a speech without pauses must not grow for ever
		d.items, d.next = append(d.items[:0], d.items[d.next:]...), 0
	}
	d.items = append(d.items, item)
	d.bytes += len(item.data)
	c.wakeLocked()
}

// wakeLocked starts the pump unless it runs or waits for a time that what was
// queued does not change.
func (c *Conversation) wakeLocked() {
	d := c.down
	if d.pumping || d.timer != nil && len(d.urgent) == 0 {
		return
	}
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
	d.pumping = c.svc.tasks.Run(c.pump)
}

// abort answers the user's interruption: what waits is thrown away, and the
// device, which goes on playing until it is told (application.cc:736-737), is
// told to stop.
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
	answered := c.muted
	c.muted = true
	c.mu.Unlock()
	if !answered { // else the device was told already, and nothing was said since
		c.stopSpeech()
	}
}

// stopSpeech sends `tts stop` ahead of everything.
func (c *Conversation) stopSpeech() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return
	}
	msg := jsonspan.AppendString([]byte(`{"type":"tts","state":"stop","session_id":`), c.id)
	d := c.downLocked()
	d.urgent = append(d.urgent, append(msg, '}'))
	d.bytes += len(msg) + 1
	c.wakeLocked()
}

// pump says what is due, then ends or leaves the rest to a timer.
func (c *Conversation) pump() {
	defer tasks.Contain(c.svc.log, c.End)
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
			d.timer = time.AfterFunc(wait, c.due)
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
		stamp := d.sent(&taken, time.Now())
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

// due is the timer's: the next item's time has come.
func (c *Conversation) due() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.down.timer = nil
	if !c.ended && !c.down.pumping {
		c.down.pumping = c.svc.tasks.Run(c.pump)
	}
}

// wait is how long the item has to wait.
func (d *downlink) wait(item *said, now time.Time) time.Duration {
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

// sent notes when the device will have played the item, and returns its
// timestamp in the speech, in milliseconds.
func (d *downlink) sent(item *said, now time.Time) uint32 {
	switch {
	case item.state == ttsStart:
		d.notBefore = now.Add(SpeechGap)
		if d.playedOut.Before(d.notBefore) {
			d.playedOut = d.notBefore
		}
		d.started = d.playedOut
	case item.state == ttsStop:
		d.playedOut, d.ahead = now, nil
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

// sendControl writes a message on the device's connection of the moment.
func (c *Conversation) sendControl(msg []byte) {
	if err := c.line.SendControl(msg); err != nil {
		c.svc.stats.MessageDrops.Add(1)
	}
}
