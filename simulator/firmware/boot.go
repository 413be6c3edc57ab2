package firmware

import (
	"context"
	"errors"
	"fmt"
	"time"
)

const (
	checkAttempts      = 10
	firstRetry         = 10 * time.Second
	activationRounds   = 10
	activationWait     = 3 * time.Second
	activationLongWait = 10 * time.Second
)

// boot is the activation task (main/application.cc:340-355, 417-509): check, activation, choice of transport. It runs
// once per start and ends with the first conversation.
func (d *Device) boot(ctx context.Context) {
	d.mu.Lock()
	d.bootedAt = time.Now()
	d.mu.Unlock()
	d.setLife(StateBooting, "")
	d.load()
	if d.crashes(faultCrashBoot) {
		return
	}
	answer, err := d.checkNewVersion(ctx)
	switch {
	case ctx.Err() != nil:
		return
	case errors.Is(err, errRestarting):
		return
	case errors.Is(err, errHang):
		d.halt(StateHung, fmt.Errorf("ota_too_large: %w", err))
		return
	case errors.Is(err, errNVS), errors.Is(err, errStoi):
		d.halt(StateBootLoop, err)
		return
	case err == nil && d.faults.has(faultCrashLater) && d.sleep(secondProgram) && d.crashes(faultCrashLater):
		return
	}
	d.mu.Lock()
	endpoint := d.settings.text("mqtt", "endpoint")
	d.clock = answer.clock
	d.mu.Unlock()
	// MQTT wins when both are offered, and is the fallback when neither is (main/application.cc:502-509).
	if answer.mqtt || !answer.websocket {
		_, parseErr := parseEndpoint(endpoint)
		switch {
		case parseErr != nil:
			d.halt(StateBootLoop, parseErr)
			return
		case endpoint == "" && err != nil:
			d.halt(StateFailed, fmt.Errorf("gave up after %d OTA checks and fell back to MQTT without an endpoint: %w", checkAttempts, err))
			return
		case endpoint == "" && answer.mqtt:
			d.halt(StateNoEndpoint, errors.New("the OTA answer selects MQTT but names no endpoint: the device never connects"))
			return
		case endpoint == "":
			d.halt(StateNoEndpoint, errors.New("the OTA answer names no transport: the device falls back to MQTT without an endpoint and never connects"))
			return
		}
		d.setLife(StateIdle, "")
		d.startMQTT(ctx)
		d.arm()
		if d.fleet.options.Talk {
			d.wake()
		}
		return
	}
	d.setLife(StateIdle, "")
	d.arm()
	d.wake()
}

// errRestarting ends a boot that led to another one.
var errRestarting = errors.New("restarting")

// checkNewVersion is Application::CheckNewVersion with its retries and the activation loop.
func (d *Device) checkNewVersion(ctx context.Context) (otaAnswer, error) {
	failures, pause := 0, firstRetry
	for {
		answer, err := d.checkOnce(ctx)
		switch {
		case err == nil:
		case errors.Is(err, errHang), errors.Is(err, errNVS), errors.Is(err, errStoi):
			return answer, err
		default:
			d.note(err.Error())
			if failures++; failures >= checkAttempts || !d.sleep(pause) {
				return answer, err
			}
			pause *= 2
			continue
		}
		failures, pause = 0, firstRetry
		if answer.upgrade {
			if d.upgrade(ctx, answer.firmwareURL) {
				return answer, errRestarting
			}
			// Before v1.8.0 a failed upgrade restarts the device, which is not confirmed then (v1.7.7 application.cc:170-178).
			d.mu.Lock()
			old := isBefore(d.runs.version, "1.8.0")
			d.mu.Unlock()
			if old {
				d.reboot()
				return answer, errRestarting
			}
		}
		d.confirm()
		if !answer.hasCode && !answer.hasChallenge {
			return answer, nil
		}
		d.setLife(StateWaiting, "waits for activation, code "+answer.code)
		if !d.activate(ctx, answer) {
			return answer, ctx.Err()
		}
	}
}

// fetch sends the OTA check and returns the reply.
func (d *Device) fetch(ctx context.Context) ([]byte, error) {
	d.mu.Lock()
	d.stats.otaChecks++
	d.mu.Unlock()
	return fetchOTA(ctx, d.fleet.dialer, d.index, d.otaURL(), d.identity(), d.systemInfo().json())
}

func (d *Device) checkOnce(ctx context.Context) (otaAnswer, error) {
	body, err := d.fetch(ctx)
	if err != nil {
		return otaAnswer{}, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.problem = ""
	return readOTA(body, &d.settings, d.runs.version)
}

// activate is one turn of the activation loop; false means that the simulation ends.
func (d *Device) activate(ctx context.Context, answer otaAnswer) bool {
	for range activationRounds {
		pause := activationLongWait
		if answer.hasChallenge {
			body := activationBody(d.serial, d.efuseKey(), answer.challenge)
			d.mu.Lock()
			d.stats.activations++
			d.mu.Unlock()
			status, err := postActivation(ctx, d.fleet.dialer, d.index, d.otaURL(), d.identity(), body)
			switch {
			case err == nil && status == 200:
				return true
			case err == nil && status == 202:
				pause = activationWait
			}
		}
		if !d.sleep(pause) {
			return false
		}
	}
	return true
}
