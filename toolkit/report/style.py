"""How the page looks and moves: colours for light and dark, bars that shrink to a phone, a cursor for mouse and keyboard."""

from __future__ import annotations

COLOURS = {
    "parameters": "#0072b2",
    "master_weights": "#56b4e9",
    "gradients": "#d55e00",
    "optimizer_states": "#009e73",
    "activations": "#e69f00",
    "logits_and_loss": "#cc79a7",
    "communication": "#8c6bb1",
    "temporaries": "#b15928",
    "unsplit": "#7f8c99",
    "rounding": "#9aa5b1",
    "outside": "#5c6773",
}
"""Okabe and Ito's palette, which readers with colour blindness tell apart, and two greys for what is no tensor."""
NAMES = {name: name.replace("_", " ") for name in COLOURS} | {
    "logits_and_loss": "logits and loss", "unsplit": "all tensors together",
    "rounding": "allocator's rounding", "outside": "outside the allocator"}

_CATEGORIES = "".join(f".{name}{{background:{colour};fill:{colour}}}" for name, colour in COLOURS.items())

CSS = """
:root{color-scheme:light dark;--ink:#1b2733;--dim:#51606e;--page:#f6f7f9;--card:#fff;--line:#d8dee5;--good:#1b7f3b;--bad:#b3261e}
@media (prefers-color-scheme:dark){:root{--ink:#e6ebf0;--dim:#a3b0bd;--page:#11161b;--card:#1a2129;--line:#36414c;--good:#6fd08c;
--bad:#ff8a80}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,"Segoe UI",Roboto,sans-serif}
main,header{max-width:70rem;margin:0 auto;padding:0 1rem}
header{padding-top:1.5rem}h1{font-size:1.6rem;line-height:1.2;margin:0 0 .25rem}h2{font-size:1.15rem;margin:0 0 .5rem}
p{margin:.25rem 0 .75rem}.dim,figcaption,caption{color:var(--dim);font-size:.9rem}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:1rem;margin:1rem 0}
.good{color:var(--good);font-weight:600}.bad{color:var(--bad);font-weight:600}
.legend{display:flex;flex-wrap:wrap;gap:.25rem 1rem;list-style:none;padding:0;margin:.25rem 0 .75rem;font-size:.85rem}
.legend i{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em}
.plans{list-style:none;margin:0;padding:0}.plans li{padding:.4rem 0}
.head{display:flex;flex-wrap:wrap;justify-content:space-between;gap:0 1rem;font-size:.92rem}
.chosen .name{font-weight:700}
.bar{position:relative;display:flex;height:22px;background:var(--page);border-radius:4px;margin-top:2px}
.bar i{display:block;height:100%;min-width:0}.bar i+i{border-left:1px solid var(--card)}
.bar b,.cap{position:absolute;top:-3px;bottom:-3px;width:0;border-left:2px dashed var(--bad)}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.88rem;width:100%}caption{text-align:left}
th,td{padding:.3rem .6rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left;white-space:normal}
figure{margin:0}.plot{position:relative;margin:.5rem 0 1.6rem 4.2rem;height:300px;border-left:1px solid var(--dim);
border-bottom:1px solid var(--dim);touch-action:pan-y}
.plot svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible}
.plot:focus-visible,summary:focus-visible,button:focus-visible,.scroll:focus-visible{outline:3px solid #4c9be8;outline-offset:2px}
.plot .y,.plot .x{position:absolute;font-size:.75rem;color:var(--dim);white-space:nowrap}
.plot .y{right:100%;margin-right:.4rem;transform:translateY(50%)}.plot .x{top:100%;margin-top:.2rem;transform:translateX(-50%)}
.plot .x.first{transform:none}.plot .x.last{transform:translateX(-100%)}
.plot .level{left:0;right:0;width:auto;height:0;border:0;border-top:2px dashed var(--bad);top:auto;bottom:auto;position:absolute}
.plot .rule{position:absolute;top:0;bottom:0;border-left:1px solid var(--dim)}
.plot .peak{position:absolute;width:12px;height:12px;margin:0 0 -6px -6px;border-radius:50%;background:var(--card);
border:3px solid var(--bad)}
.plot .cursor{position:absolute;top:0;bottom:0;border-left:2px solid var(--ink);pointer-events:none}
.readout{font-size:.9rem;min-height:5.5rem}.readout ul{margin:.25rem 0}
pre{overflow-x:auto;background:var(--page);border:1px solid var(--line);border-radius:6px;padding:.6rem;font-size:.85rem;
margin:.25rem 0}
button{font:inherit;font-size:.85rem;padding:.15rem .7rem;border-radius:6px;border:1px solid var(--line);background:var(--page);
color:var(--ink)}details{margin-top:.5rem}summary{cursor:pointer}
.skip{position:absolute;left:-999px}.skip:focus{left:1rem;top:.5rem;background:var(--card);padding:.3rem .6rem;z-index:2}
@media print{section{break-inside:avoid}}
""" + _CATEGORIES

JS = r"""
(function(){
'use strict';
var holder=document.getElementById('timeline-data');
function size(n){var u=[[1099511627776,'TiB'],[1073741824,'GiB'],[1048576,'MiB'],[1024,'KiB']];
 for(var i=0;i<u.length;i++){if(Math.abs(n)>=u[i][0]){var v=n/u[i][0];
  return (v>=100?v.toFixed(0):v.toPrecision(3).replace(/\.?0+$/,''))+' '+u[i][1];}}
 return n+' B';}
if(holder){
 var t=JSON.parse(holder.textContent),plot=document.getElementById('timeline'),out=document.getElementById('alive'),
  cursor=plot.querySelector('.cursor'),last=t.level.length-1,at=t.peak;
 var place=function(i){var r=t.runs.filter(function(r){return i>=r[2]&&i<r[3];})[0]||['',''],
   step=t.steps.filter(function(s){return s<=i;}).length;
  return 'step '+step+', '+r[0]+(r[1]?', '+r[1]:'');};
 var show=function(i){
  at=Math.max(0,Math.min(last,i));
  cursor.style.left=(last?100*at/last:0)+'%';cursor.hidden=false;
  var alive=Object.keys(t.categories).map(function(c){return [c,t.categories[c][at]];}).filter(function(c){return c[1]>0;});
  alive.sort(function(a,b){return b[1]-a[1];});
  var title=place(at)+': '+size(t.level[at])+(at===t.peak?' (the peak)':'');
  out.textContent='';
  var p=document.createElement('p'),b=document.createElement('strong'),ul=document.createElement('ul');
  b.textContent=title;p.appendChild(b);out.appendChild(p);ul.className='legend';
  alive.forEach(function(c){var li=document.createElement('li'),mark=document.createElement('i');mark.className=c[0];
   li.appendChild(mark);li.appendChild(document.createTextNode(c[0].replace(/_/g,' ')+' '+size(c[1])));ul.appendChild(li);});
  out.appendChild(ul);
  plot.setAttribute('aria-valuenow',at);
  plot.setAttribute('aria-valuetext',title+'. Alive: '+alive.map(function(c){
   return c[0].replace(/_/g,' ')+' '+size(c[1]);}).join(', '));};
 plot.addEventListener('pointermove',function(e){var r=plot.getBoundingClientRect();
  show(Math.round((e.clientX-r.left)/r.width*last));});
 plot.addEventListener('pointerdown',function(e){var r=plot.getBoundingClientRect();
  show(Math.round((e.clientX-r.left)/r.width*last));});
 plot.addEventListener('pointerleave',function(){show(t.peak);});
 plot.addEventListener('keydown',function(e){
  var moves={ArrowLeft:at-1,ArrowRight:at+1,ArrowDown:at-1,ArrowUp:at+1,PageDown:at-20,PageUp:at+20,Home:0,End:last,p:t.peak};
  if(Object.prototype.hasOwnProperty.call(moves,e.key)&&!e.ctrlKey&&!e.metaKey&&!e.altKey){e.preventDefault();show(moves[e.key]);}});
 show(t.peak);
}
Array.prototype.forEach.call(document.querySelectorAll('button[data-copy]'),function(button){
 if(!navigator.clipboard){button.hidden=true;return;}
 button.addEventListener('click',function(){
  navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent).then(
   function(){button.textContent='Copied';},function(){button.textContent='Not copied';});});});
})();
"""
