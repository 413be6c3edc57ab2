//go:build brokenfence

package fleet

const fenced = false
