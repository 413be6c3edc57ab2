package main

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"time"
)

const (
	frameDuration = 60 * time.Millisecond
	// wakeBurst is about two seconds of audio recorded before the channel was open.
	wakeBurst = 33
	// sendQueue is the number of packets the firmware keeps; the oldest go first.
	sendQueue = 40
)

var errAudio = errors.New("malformed binary frame")

// packAudio wraps one Opus packet for protocol version 1, 2 or 3 (main/protocols/protocol.h:17-31); any other version
// is framed like 1.
func packAudio(b []byte, version int32, timestamp uint32, opus []byte) []byte {
	switch version {
	case 2:
		b = append(b, 0, 2, 0, 0, 0, 0, 0, 0)
		b = binary.BigEndian.AppendUint32(b, timestamp)
		b = binary.BigEndian.AppendUint32(b, uint32(len(opus)))
	case 3:
		b = append(b, 0, 0)
		b = binary.BigEndian.AppendUint16(b, uint16(len(opus)))
	}
	return append(b, opus...)
}

// unpackAudio is the reverse for packets from the server. The firmware trusts payload_size: a size beyond the message
// makes it read foreign memory, which is reported as errAudio; a smaller one plays the beginning only.
func unpackAudio(version int32, msg []byte) (opus []byte, timestamp uint32, err error) {
	head, size := 0, len(msg)
	switch version {
	case 2:
		head = 16
		if len(msg) >= head {
			timestamp = binary.BigEndian.Uint32(msg[8:])
			size = int(binary.BigEndian.Uint32(msg[12:]))
		}
	case 3:
		head = 4
		if len(msg) >= head {
			size = int(binary.BigEndian.Uint16(msg[2:]))
		}
	default:
		return msg, 0, nil
	}
	if len(msg) < head {
		return nil, 0, fmt.Errorf("%w: %d bytes, the header of version %d needs %d", errAudio, len(msg), version, head)
	}
	if size > len(msg)-head {
		return nil, 0, fmt.Errorf("%w: payload_size %d, but %d bytes are there", errAudio, size, len(msg)-head)
	}
	return msg[head : head+size], timestamp, nil
}

// opusFrame writes packet number n: three 20 ms CELT frames (RFC 6716: configuration 23, code 3, constant size), each
// beginning with the silence flag. Decoders play silence; the bytes behind the flag carry the counter, so that no two
// packets and no two devices are alike.
func opusFrame(b []byte, key, n uint64) []byte {
	b = append(b, 23<<3|3, 3)
	for i := range uint64(3) {
		b = append(b, 0xff, 0xfe)
		b = binary.BigEndian.AppendUint64(b, key)
		b = binary.BigEndian.AppendUint64(b, n*3+i)
		b = append(b, 0, 0, 0, 0, 0, 0)
	}
	return b
}

// audioStats counts audio; it exists only on devices that saw some.
type audioStats struct {
	sent, received, played uint64
	sentSum, receivedSum   hash.Hash
}

func (s *deviceStats) audioLocked() *audioStats {
	if s.audio == nil {
		s.audio = &audioStats{sentSum: sha256.New(), receivedSum: sha256.New()}
	}
	return s.audio
}

func hexSum(h hash.Hash) string { return hex.EncodeToString(h.Sum(nil)) }

// onAudio counts what the server plays. It is heard only in the speaking state (main/application.cc:518-522).
func (d *device) onAudio(msg []byte) {
	d.mu.Lock()
	opus, _, err := unpackAudio(d.wsVersion, msg)
	if err == nil {
		a := d.stats.audioLocked()
		a.received++
		a.receivedSum.Write(opus)
		if d.app == appSpeaking {
			a.played++
		}
	}
	d.mu.Unlock()
	if err != nil {
		d.fail(fmt.Errorf("%w: %w", errCrash, err))
	}
}

// onTTS moves between listening and speaking (main/application.cc:551-572).
func (d *device) onTTS(state value) {
	if !state.is(jsonString) {
		if d.profile.ttsNeedsState {
			d.fail(fmt.Errorf("%w: tts message without state is a null dereference before v2.4.0", errCrash))
		}
		return
	}
	switch string(state.bytes()) {
	case "start":
		d.mu.Lock()
		d.app = appSpeaking
		d.stopTalkLocked()
		d.mu.Unlock()
	case "stop":
		d.mu.Lock()
		speaking := d.app == appSpeaking
		manual := d.mode == "manual"
		if speaking {
			d.app = appIdle
		}
		d.mu.Unlock()
		if speaking && !manual {
			d.listen("auto")
		}
	}
}

// startTalking is ContinueWakeWordInvoke (main/application.cc:866-905): the audio of the wake word, detect, start.
func (d *device) startTalking(stale bool) {
	for range wakeBurst {
		d.sendPacket()
	}
	d.sendText(d.listenText(`"detect","text":"你好小智"`))
	if d.fleet.options.talkFor > 0 {
		d.listen("manual")
	} else {
		d.listen("auto")
	}
	if stale {
		// The destroyed old socket scheduled "go idle" behind this job.
		d.mu.Lock()
		d.app = appIdle
		d.stopTalkLocked()
		d.mu.Unlock()
	}
}

func (d *device) listenText(state string) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return `{"session_id":"` + d.sessionID + `","type":"listen","state":` + state + `}`
}

// listen enters the listening state and starts the microphone.
func (d *device) listen(mode string) {
	d.sendText(d.listenText(`"start","mode":"` + mode + `"`))
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.out == nil || d.errored {
		return
	}
	d.app, d.mode = appListening, mode
	d.stopTalkLocked()
	due := time.Now().Add(frameDuration)
	d.talkTimer = d.fleet.after(frameDuration, func() { d.microphone(due) })
	if stop := d.fleet.options.talkFor; stop > 0 && mode == "manual" {
		d.fleet.after(stop, d.stopListening)
	}
}

// stopListening is the release of the talk button: the device goes idle, the channel stays open.
func (d *device) stopListening() {
	d.mu.Lock()
	listening := d.app == appListening
	if listening {
		d.app = appIdle
		d.stopTalkLocked()
	}
	d.mu.Unlock()
	if listening {
		d.post(job{kind: jobText, text: d.listenText(`"stop"`)})
		d.pump(false)
	}
}

// microphone queues one packet and comes back in 60 ms, counted from the clock and not from now, so that a busy
// machine does not stretch the stream.
func (d *device) microphone(due time.Time) {
	d.mu.Lock()
	if d.app != appListening || d.talkTimer == nil {
		d.mu.Unlock()
		return
	}
	next := due.Add(frameDuration)
	d.talkTimer = d.fleet.after(max(0, time.Until(next)), func() { d.microphone(next) })
	d.frame++
	full := d.audioQueue >= sendQueue
	if !full {
		d.audioQueue++
		d.jobs = append(d.jobs, job{kind: jobAudio})
	}
	d.mu.Unlock()
	d.pump(false)
}

// sendMicrophone is the main loop's share: a slow tool delays audio as well.
func (d *device) sendMicrophone() {
	d.mu.Lock()
	d.audioQueue = max(0, d.audioQueue-1)
	d.mu.Unlock()
	d.sendPacket()
}

func (d *device) sendPacket() {
	room := getBuffer()
	var buf [128]byte
	d.mu.Lock()
	out, version := d.out, d.wsVersion
	if out == nil {
		d.mu.Unlock()
		putBuffer(room)
		return
	}
	a := d.stats.audioLocked()
	sum := derive(0, d.clientID, "voice")
	opus := opusFrame(buf[:0], binary.BigEndian.Uint64(sum[:]), a.sent)
	a.sent++
	a.sentSum.Write(opus)
	d.mu.Unlock()
	*room = packAudio(appendFrameRoom(*room), version, 0, opus)
	d.write(out, opBinary, room)
}

func (d *device) stopTalkLocked() {
	if d.talkTimer != nil {
		d.talkTimer.Stop()
		d.talkTimer = nil
	}
}

// sendGarbage is the fault bad-frame: audio before the hello, then frames no firmware would send.
func (d *device) sendGarbage(out link, beforeHello bool) {
	send := func(opcode byte, data string) {
		room := getBuffer()
		*room = append(appendFrameRoom(*room), data...)
		d.write(out, opcode, room)
	}
	if beforeHello {
		send(opBinary, "\xf8\xff\xfe")
		return
	}
	send(opText, `{"type":"listen","state":"detect","text":"say "hi""}`)
	send(opText, `[1,2`)
	send(opText, `{"no":"type"}`)
	send(opText, "")
	send(opBinary, "")
	send(opBinary, "\x00\x02\x00\x00\x00\x00\x00\x00\x00\x00\x03\x09")
	send(opBinary, "\x00\x02\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x64abc")
	send(opBinary, "\x00\x00\xff\xff\x00")
}
