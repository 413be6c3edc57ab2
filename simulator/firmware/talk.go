package firmware

import (
	"fmt"
	"time"
)

const (
	frameDuration = 60 * time.Millisecond
	// wakeBurst is about two seconds of audio recorded before the channel was open.
	wakeBurst = 33
	// sendQueue is the number of packets the firmware keeps; the oldest go first.
	sendQueue = 40
	// replyPatience is how long the person in front of the device waits for an answer.
	replyPatience = 30 * time.Second
	// farewell is how long that person takes, after the answer, to end the conversation.
	farewell = time.Second
)

// talkState is the conversation of a device as the person in front of it sees it; guarded by the device's mutex.
type talkState struct {
	position, silent int // position in the recording and in the silence
	speechLeft       int // packets until the utterance is over
	// turn changes whenever the server or the person takes over: what was put off before does not happen any more.
	turn   int
	farend *time.Timer
}

// onTTS moves between listening and speaking (main/application.cc:551-572).
func (d *Device) onTTS(state value) {
	if !state.is(jsonString) {
		if d.profile.ttsNeedsState {
			d.fail(fmt.Errorf("%w: tts message without state is a null dereference before v2.4.0", errCrash))
		}
		return
	}
	switch string(state.bytes()) {
	case "start":
		d.startSpeaking()
	case "stop":
		d.stopSpeaking()
	}
}

// startSpeaking resets the decoder and its queue.
func (d *Device) startSpeaking() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.app == appSpeaking {
		return
	}
	d.app = appSpeaking
	d.hushLocked()
	if a := d.stats.audio; a != nil {
		a.play(time.Now(), d.fleet.hashSeed)
		a.resetByStart += uint64(a.speaker.reset())
	}
}

// stopSpeaking goes on listening, in manual mode it idles. Up to v2.1.0 what is still queued is thrown away; v2.2 and
// v2.3 block the main loop until it has been played; since v2.4 only listen start waits.
func (d *Device) stopSpeaking() {
	d.mu.Lock()
	if d.app != appSpeaking {
		d.mu.Unlock()
		return
	}
	now := time.Now()
	left := time.Duration(0)
	manual := d.mode == "manual"
	if a := d.stats.audio; a != nil {
		a.play(now, d.fleet.hashSeed)
		if d.profile.cutsTail && !manual {
			a.cutOff += uint64(a.speaker.reset())
		}
		left = a.speaker.left(now)
	}
	d.app = appIdle
	if !manual {
		d.app = appListening
	}
	turn := d.talk.turn
	if manual {
		d.armEndLocked(left + d.fleet.scaled(farewell))
	} else {
		d.disarmEndLocked()
	}
	d.mu.Unlock()
	again := func() {
		d.mu.Lock()
		mine := d.talk.turn == turn && d.app == appListening
		d.mu.Unlock()
		if mine {
			d.listen("auto", 0)
			// Only now: on a busy machine the end could come before the listening.
			d.mu.Lock()
			if d.talk.turn == turn {
				d.armEndLocked(d.fleet.scaled(farewell))
			}
			d.mu.Unlock()
		}
	}
	switch {
	case manual:
	case left == 0:
		again()
	case d.profile.waitsTail:
		d.post(job{kind: jobDo, do: func() {
			d.pause(left)
			again()
		}})
	default:
		d.fleet.after(left, again)
	}
}

// startTalking is ContinueWakeWordInvoke (main/application.cc:866-905): the audio of the wake word, detect, start.
func (d *Device) startTalking(stale bool) {
	o := d.fleet.options
	d.mu.Lock()
	d.stats.audioLocked().echo.begin()
	d.talk.position = 0
	d.mu.Unlock()
	for range wakeBurst {
		d.sendVoice(true, false)
	}
	d.sendText(d.listenText(`"detect","text":"你好小智"`))
	mode := "auto"
	if o.TalkFor > 0 {
		mode = "manual"
	}
	d.listen(mode, int(o.Utterance/frameDuration))
	d.mu.Lock()
	defer d.mu.Unlock()
	if stale {
		// The destroyed old socket scheduled "go idle" after this job.
		d.app = appIdle
		d.hushLocked()
		return
	}
	d.armEndLocked(max(o.Utterance, o.TalkFor) + d.fleet.scaled(replyPatience))
}

func (d *Device) listenText(state string) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return `{"session_id":"` + d.sessionID + `","type":"listen","state":` + state + `}`
}

// listen enters the listening state and starts the microphone: speech packets of voice, then silence.
func (d *Device) listen(mode string, speech int) {
	d.sendText(d.listenText(`"start","mode":"` + mode + `"`))
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.out == nil || d.errored {
		return
	}
	d.app, d.mode = appListening, mode
	d.talk.speechLeft = speech
	d.stopTalkLocked()
	due := time.Now().Add(frameDuration)
	d.talkTimer = d.fleet.after(frameDuration, func() { d.microphone(due) })
	if stop := d.fleet.options.TalkFor; stop > 0 && mode == "manual" {
		turn := d.talk.turn
		d.fleet.after(stop, func() { d.stopListening(turn) })
	}
}

// stopListening is the release of the talk button: the device goes idle, the channel stays open.
func (d *Device) stopListening(turn int) {
	d.mu.Lock()
	listening := d.app == appListening && d.talk.turn == turn
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
func (d *Device) microphone(due time.Time) {
	d.mu.Lock()
	if d.app != appListening || d.talkTimer == nil {
		d.mu.Unlock()
		return
	}
	next := due.Add(frameDuration)
	d.talkTimer = d.fleet.after(max(0, time.Until(next)), func() { d.microphone(next) })
	full := d.audioQueue >= sendQueue
	if !full {
		d.audioQueue++
		kind := jobSilence
		if d.talk.speechLeft > 0 {
			d.talk.speechLeft--
			kind = jobSpeech
		}
		d.jobs = append(d.jobs, job{kind: kind})
	}
	d.mu.Unlock()
	d.pump(false)
}

// sendMicrophone runs in the main loop, after whatever blocks it.
func (d *Device) sendMicrophone(speech bool) {
	d.mu.Lock()
	d.audioQueue--
	d.mu.Unlock()
	d.sendVoice(speech, true)
}

// stopTalkLocked switches the microphone off.
func (d *Device) stopTalkLocked() {
	if d.talkTimer != nil {
		d.talkTimer.Stop()
		d.talkTimer = nil
	}
}

// hushLocked also forgets everything that was put off until later.
func (d *Device) hushLocked() {
	d.stopTalkLocked()
	d.talk.turn++
	d.disarmEndLocked()
}

// armEndLocked lets the person end the conversation later, if nothing happens before. A WebSocket that no wake word
// would open again stays as it is.
func (d *Device) armEndLocked(delay time.Duration) {
	o := d.fleet.options
	if !o.Talk || (d.mqtt == nil && o.Wake <= 0) {
		return
	}
	d.disarmEndLocked()
	turn := d.talk.turn
	d.talk.farend = d.fleet.after(delay, func() {
		d.post(job{kind: jobDo, do: func() { d.endConversation(turn) }})
		d.pump(false)
	})
}

func (d *Device) disarmEndLocked() {
	if d.talk.farend != nil {
		d.talk.farend.Stop()
		d.talk.farend = nil
	}
}

// endConversation is the button while the device listens or idles: the channel is closed.
func (d *Device) endConversation(turn int) {
	d.mu.Lock()
	due := d.talk.turn == turn && d.app != appSpeaking
	d.mu.Unlock()
	if due {
		d.closeChannel()
	}
}
